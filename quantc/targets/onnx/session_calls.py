"""Calls of an ONNX session with the inputs and outputs of the program it was exported from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils import _pytree as pytree

from quantc.ir.finite_inputs import Watch
from quantc.ir.program import Program
from quantc.ir.signature import Signature, as_tensors
from quantc.targets.argument_cache import KnownArguments
from quantc.targets.kernels.input_checks import check_device, check_gradients
from quantc.targets.onnx.onnx_export import Exported, Literal
from quantc.targets.onnx.sessions import Session


@dataclass(frozen=True, eq=False)
class Calling:
    """Conversion of arguments to a model's flat inputs, and of its flat outputs to the program's."""

    signature: Signature
    exported: Exported
    watch: Watch
    """Inputs to check for NaN: engines make a number of it."""
    is_one: bool
    """True if the program returns the model's single output itself."""
    known: KnownArguments = field(default_factory=KnownArguments)

    @staticmethod
    def of(program: Program, exported: Exported) -> Calling:
        is_one = program.signature.out_spec.is_leaf() and exported.outputs == (0,)
        return Calling(program.signature, exported, Watch.of(program.graph, program.signature), is_one)

    def __call__(self, session: Session, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kind = KnownArguments.kind(args, kwargs)
        is_known = kind in self.known
        leaves = args if is_known else self._check_inputs(args, kwargs)
        self.watch.check(leaves)
        if not is_known:
            self.known.add(kind)
        made = session([leaves[index] for index in self.exported.inputs])
        return made[0] if self.is_one else self.arranged(made)

    def _check_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any]:
        """The flat inputs, which fit."""
        leaves, spec = self.signature.flatten(args, kwargs)
        leaves = as_tensors(leaves) or leaves
        self.signature.check(leaves, spec)
        check_device(leaves, self.signature)
        check_gradients(leaves, self.signature)
        return leaves

    def arranged(self, made: Sequence[Any]) -> Any:
        """Results of an engine, in the program's output structure."""
        places = self.exported.outputs
        flat = [place.value if isinstance(place, Literal) else made[place] for place in places]
        return flat[0] if self.signature.out_spec.is_leaf() else pytree.tree_unflatten(flat, self.signature.out_spec)
