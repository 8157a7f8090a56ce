"""The result of `convert_fx`: a module on int8 kernels, with the user's own modules in it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Generator, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from quantc.errors import InputError, ModeError
from quantc.flows.fx.custom_config import CustomConfigError
from quantc.flows.fx.kept_whole import watch_like
from quantc.flows.fx.observed_module import by_position
from quantc.flows.fx.state import Grid, numbers_of, put_numbers
from quantc.ir.program import Program
from quantc.pipeline.pipeline import Pipeline
from quantc.spec.formats import DType
from quantc.targets.kernels.lowered import Lowered
from quantc.targets.kernels.module_as_op import portable_module
from quantc.targets.kernels.running_form import Choosing
from quantc.targets.target_table import KERNEL_FORM

QUANTIZED = {DType.UINT8: torch.quint8, DType.INT8: torch.qint8}


OWN = frozenset({*vars(nn.Module()), "_settling", "_key", "choosing"})
"""The attributes of a lowered module that stay when it runs another program."""


class QuantizedGraphModule(Lowered):
    """A quantized model on int8 kernels. It is called like the model, and copied and saved as any lowered program is:
    see `quantc.targets.kernels.lowered.Lowered`."""

    inputs: tuple[int, ...] = ()
    """Positions of the inputs that come as quantized tensors."""
    outputs: Mapping[int, Grid] = MappingProxyType({})
    """Positions and grids of the outputs that are returned as quantized tensors."""
    preserved: tuple[str, ...] = ()
    original_weights_lookup: Mapping[str, tuple[Tensor, Tensor | None]] = MappingProxyType({})
    """The float weights and biases of quantized ops, where they were to be kept."""
    is_standalone: bool = False
    """True if it was prepared on its own, as a part of a larger model."""

    @classmethod
    def of(cls, program: Program, target: str, inputs: Iterable[int], outputs: Iterable[int]) -> QuantizedGraphModule:
        """Lower a converted program."""
        made = cls(Pipeline.parse(KERNEL_FORM).run_on_copy(program), target)
        if made.placed and not any(row.kernel for row in made.placed):
            warnings.warn(
                f"{target} has kernels for none of the quantized ops of {program.name}: print(quantized) says why",
                stacklevel=3,
            )
        made.inputs = tuple(inputs)
        made.outputs = {index: grid_of_output(program, index) for index in outputs}
        return made

    def preserve(self, source: nn.Module, names: Iterable[str]) -> None:
        """Take attributes of another module over."""
        self.preserved = tuple(names)
        for name in self.preserved:
            setattr(self, name, getattr(source, name))

    @property
    def graph(self) -> fx.Graph:
        """The graph of the running module, kernels included."""
        return self.module.graph

    @property
    def code(self) -> str:
        return self.module.code

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            running = self.__dict__.get("_running")
            if running is None:
                raise
            return getattr(running.module, name)  # modules of the user's own, by the names they had

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs:
            args, kwargs = by_position(self._program.signature, args, kwargs)
        run = portable_module(self) if torch.jit.is_tracing() else super().forward  # type: ignore[attr-defined, no-untyped-call]
        if not self.inputs and not self.outputs:
            return run(*args, **kwargs)
        is_asked = self._is_quantized_inside(args)
        args = tuple(
            _as_float(x, index) if index in self.inputs and not is_asked else x for index, x in enumerate(args)
        )
        made = run(*args, **kwargs)
        if not self.outputs or is_asked:
            return made
        leaves, spec = pytree.tree_flatten(made)
        leaves = [self._on_grid(x, index) for index, x in enumerate(leaves)]
        return pytree.tree_unflatten(leaves, spec)

    def _is_quantized_inside(self, args: tuple[Any, ...]) -> bool:
        """True inside a quantized model, which passes and expects float tensors that lie on their grids. Called by itself, a
        standalone module takes and returns quantized tensors."""
        given = [args[index] for index in self.inputs if index < len(args)]
        return self.is_standalone and not any(isinstance(x, Tensor) and x.is_quantized for x in given)

    def _on_grid(self, x: Any, index: int) -> Any:
        return torch.quantize_per_tensor(x, *self.outputs[index]) if index in self.outputs else x

    # -- its state: that of the portable program, whatever kernels run it -----------------------------------------

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Generator[tuple[str, nn.Module], None, None]:
        """Itself, and the modules that its graph names."""
        known = set[nn.Module]() if memo is None else memo
        if self not in known:
            known.add(self)
            yield prefix, self
        for name, module in self.module.named_modules(None, "", remove_duplicate):
            if name and not (remove_duplicate and module in known):
                known.add(module)
                yield f"{prefix}.{name}".lstrip("."), module

    def _named_members(self, *args: Any, **kwargs: Any) -> Any:
        """No tensor is listed: torch.export would take those of kernels beside those of the portable program."""
        return iter(())

    def get_extra_state(self) -> Tensor:
        return numbers_of(self._program, self.outputs)

    def set_extra_state(self, state: Tensor) -> None:
        """Done when tensors are loaded, with them."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}_extra_state"] = self.get_extra_state()
        self.program.root.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        program = self.program.clone()
        own = {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
        numbers, outputs = own.pop("_extra_state", None), dict(self.outputs)
        if numbers is None:
            missing_keys.append(f"{prefix}_extra_state")
        else:
            outputs = put_numbers(program, numbers)
        found = program.root.load_state_dict(own, strict=False)
        missing_keys.extend(f"{prefix}{name}" for name in found.missing_keys)
        unexpected_keys.extend(f"{prefix}{name}" for name in found.unexpected_keys if strict)
        if strict and (missing_keys or unexpected_keys):
            return  # torch refuses them by name; a part of a state would be nobody's
        self._become(program)
        self.outputs = outputs

    def _become(self, program: Program) -> None:
        """Run another program, on the same kernels."""
        other = QuantizedGraphModule(program, self.target, self._as_chosen(), self.is_compiled)
        self.__dict__.update({name: value for name, value in vars(other).items() if name not in OWN})

    def _as_chosen(self) -> Choosing:
        return Choosing(allow_float=self.choosing.allow_float, saved=self.choices, pipeline=self.choosing.pipeline)

    def __prepare_scriptable__(self) -> NoReturn:
        raise ModeError(
            f"{self._program.name} runs on kernels, which torch.jit.script cannot read",
            where="torch.jit.script",
            advice="torch.jit.trace(quantized, example_inputs) takes its portable form; or save it, or torch.export it",
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedGraphModule:
        made = QuantizedGraphModule(self.program.clone(), self.target, self._as_chosen(), self.is_compiled)
        memo[id(self)] = made
        watch_like(self, made)
        made.inputs, made.outputs, made.preserved = self.inputs, dict(self.outputs), self.preserved
        made.is_standalone = self.is_standalone
        made.original_weights_lookup = copy.deepcopy(dict(self.original_weights_lookup), memo)
        for name in self.preserved:
            setattr(made, name, copy.deepcopy(getattr(self, name), memo))
        return made


def _as_float(x: Any, index: int) -> Tensor:
    if not isinstance(x, Tensor) or not x.is_quantized:
        raise InputError(
            f"input {index} is not a quantized tensor",
            where=f"input_quantized_idxs names {index}",
            advice="give torch.quantize_per_tensor(x, scale, zero_point, torch.quint8), or prepare without that index",
        )
    return x.dequantize()


def grid_of_output(program: Program, index: int) -> Grid:
    """The scale, zero point and dtype of an output that is quantized."""
    output = next(node for node in reversed(program.graph.nodes) if node.op == "output")
    values = [leaf for leaf in pytree.tree_leaves(output.args) if isinstance(leaf, fx.Node)]
    value = values[index] if index < len(values) else None
    if value is None or not str(value.target).startswith("quantized_decomposed.dequantize_per_tensor"):
        raise CustomConfigError(
            f"output {index} is not quantized, and is to be given as a quantized tensor",
            where="output_quantized_idxs",
            advice="leave the index out: the op that yields it is float",
        )
    scale, zero_point, _, _, dtype = value.args[1:6]
    quantized = torch.quint8 if dtype == torch.uint8 else torch.qint8
    return float(scale), int(zero_point), quantized  # type: ignore[arg-type]
