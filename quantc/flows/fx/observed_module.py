"""The result of `prepare_fx`: a GraphModule to calibrate or train."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from quantc.annotate.quantizer import Backend
from quantc.flows.fx.assign_qconfigs import Choice
from quantc.flows.fx.custom_config import PrepareCustomConfig
from quantc.flows.fx.kept_whole import watch_like
from quantc.flows.fx.native_rules import NATIVE
from quantc.flows.fx.observers_in_graph import Makers, remove
from quantc.flows.fx.qconfig_mapping import QConfigMapping
from quantc.ir.program import Program, attribute
from quantc.ir.signature import Signature

if TYPE_CHECKING:
    from quantc.inspect.coverage import Coverage


@dataclass(frozen=True)
class Preparation:
    """The state that prepare leaves for convert."""

    program: Program
    """The graph with its observers, and the plan."""
    mapping: QConfigMapping
    custom: PrepareCustomConfig
    observers: dict[str, list[str]] = field(default_factory=dict)
    """The names of the observers of each group."""
    backend: Backend = NATIVE
    """The backend the program was prepared for."""

    def makers(self) -> Makers:
        return Makers(self.program, Choice(self.program, self.mapping))

    def copied(self) -> Preparation:
        return replace(self, program=self.program.clone())


class ObservedGraphModule(fx.GraphModule):
    """A prepared model. Calling it calibrates it: observers stand in its graph, `activation_post_process_<n>`.

    It has the parameters and buffers of the model under their names, batch norms folded away. Copies are independent;
    `state_dict` holds what observers have seen. `prepared.program` is what the engine knows of it.
    """

    def __init__(self, preparation: Preparation) -> None:
        program = preparation.program
        built = program.module
        super().__init__(built, built.graph, type(self).__name__)
        for name, module in built.named_modules():
            target = attribute(self, name) if name else self
            if isinstance(target, nn.Module):
                target._non_persistent_buffers_set |= module._non_persistent_buffers_set
        self.__dict__["_preparation"] = preparation
        self.train(program.training)
        self.register_forward_pre_hook(_check_inputs, with_kwargs=True)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    @property
    def preparation(self) -> Preparation:
        """The input of convert: the prepared program with the current tensors and modules of this module."""
        preparation: Preparation = self.__dict__["_preparation"]
        root = preparation.program.root
        for node in preparation.program.graph.nodes:
            if node.op in ("get_attr", "call_module"):
                _hand_over(root, self, str(node.target))
        return preparation

    @property
    def program(self) -> Program:
        """The program behind it: `prepared.program.coverage()` says what is quantized, and what is not and why."""
        return self.preparation.program

    def coverage(self) -> Coverage:
        """The outcome of every op of the model: quantized, or float and why."""
        bare = self.program.draft()
        remove(bare)
        return bare.coverage()

    def __deepcopy__(self, memo: dict[int, Any]) -> ObservedGraphModule:
        copied = ObservedGraphModule(self.preparation.copied())
        memo[id(self)] = copied
        copied.train(self.training)
        watch_like(self, copied)
        preserve(self, copied, self.preparation.custom.preserved_attributes, memo)
        return copied

    def __prepare_scriptable__(self) -> Any:
        from quantc.errors import ModeError

        raise ModeError(
            "a prepared model has observers in it, which torch.jit.script cannot read",
            where="torch.jit.script",
            advice="calibrate or train it as it is; what convert_fx gives goes through torch.jit.trace",
        )

    def __reduce__(self) -> Any:
        from quantc.errors import SaveError

        raise SaveError(
            "a prepared model is not pickled: a file must not hold code",
            advice="save prepared.state_dict(), prepare the same model again, and load it there",
        )


def preserve(source: nn.Module, target: nn.Module, names: Iterable[str], memo: dict[int, Any] | None = None) -> None:
    """Give a module attributes of another."""
    for name in names:
        value = getattr(source, name)
        setattr(target, name, value if memo is None else copy.deepcopy(value, memo))


def _hand_over(root: nn.Module, module: nn.Module, target: str) -> None:
    """Copy an attribute of the module into the program if it was replaced."""
    parent, _, leaf = target.rpartition(".")
    held, current = attribute(root, target), attribute(module, target)
    if held is not current and current is not None:
        setattr(root.get_submodule(parent), leaf, current)


def by_position(signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments of a call as the example inputs had them: those that were given by name instead in their places."""
    names = signature.parameters[: signature.in_spec.children()[0].num_children]
    missing = names[len(args) :]
    if not kwargs or not all(name in kwargs for name in missing):
        return args, kwargs
    rest = {name: value for name, value in kwargs.items() if name not in missing}
    return (*args, *(kwargs[name] for name in missing)), rest


def _check_inputs(module: ObservedGraphModule, args: Any, kwargs: Any) -> Any:
    """Sizes that are fixed, and inputs that were none, are refused by name."""
    if torch.compiler.is_compiling():
        return args, kwargs
    signature = module.__dict__["_preparation"].program.signature
    args, kwargs = by_position(signature, args, kwargs)
    leaves, spec = pytree.tree_flatten((args, kwargs))
    signature.check(leaves, spec)
    return args, kwargs
