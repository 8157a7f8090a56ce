"""Finiteness of constants: weights, biases and statistics with NaN or infinity are refused, by name, at conversion."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor, fx, nn

from quantc.errors import DataError, TrainingError
from quantc.ir.dialect import ADDING, argument, op_name
from quantc.ir.infinite_masks import is_mask
from quantc.support.finite_tensors import count_not_finite, why_not_finite

if TYPE_CHECKING:
    from quantc.ir.program import Program

HELD = ("_fake_quantizers", "_norms", "_modes", "_observers")
"""Submodules that hold observers and ranges, which are checked as scales: ranges are infinite until they are found."""
LAYERS = tuple(
    f"aten.{name}"
    for name in ("conv", "linear", "addmm", "mm", "bmm", "batch_norm", "_native_batch_norm", "layer_norm")
)
"""Name prefixes of the functions for matmul-like ops and norms."""


def refuse_unsound(program: Program) -> None:
    """Raise, naming the first, if a tensor that the program reads holds NaN or infinity. Masks may be infinite."""
    for name, tensor, where, may_be_infinite in _read(program):
        if why_not_finite(tensor, may_be_infinite=may_be_infinite) is not None:
            raise _fault(name, tensor, where, learns=program.is_live)


def refuse_unsound_module(module: nn.Module) -> None:
    """The same for the tensors of a module, except those of observers: their scales are checked when they are found.

    The model's own buffers may be masks. Buffers of torch's layers may not, nor may those that matmul-like ops and
    norms of a graph read.
    """
    observers = [
        f"{path}." for path, part in module.named_modules() if callable(getattr(part, "calculate_qparams", None))
    ]
    for path, part in module.named_modules():
        if f"{path}.".startswith(tuple(observers)):
            continue
        for name, tensor in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)):
            whole = f"{path}.{name}" if path else name
            is_own = not isinstance(tensor, nn.Parameter) and not _belongs_to_layer(module, part, whole)
            if why_not_finite(tensor, may_be_infinite=is_own) is not None:
                raise _fault(whole, tensor, path or type(part).__name__, learns=False)


def _belongs_to_layer(module: nn.Module, part: nn.Module, name: str) -> bool:
    if isinstance(module, fx.GraphModule):
        reads = (node for node in module.graph.find_nodes(op="get_attr") if str(node.target) == name)
        return any(str(user.target).startswith(LAYERS) for node in reads for user in node.users)
    return type(part).__module__.startswith(("torch.", "quantc."))


def _read(program: Program) -> Iterator[tuple[str, Tensor, str, bool]]:
    """The tensors that the graphs of a program read: name, value, where, and whether it is a mask."""
    for path, graph in program.graphs():
        owner = program.owner(graph)
        prefix = f"{path}/" if path else ""
        for node in graph.nodes:
            reader = next((user for user in node.users if not _multiplies_by_zero(user, node)), None)
            if node.op == "get_attr" and reader is not None and (tensor := program.tensor(node)) is not None:
                yield (
                    f"{prefix}{node.target}",
                    tensor,
                    program.describe(reader),
                    not isinstance(tensor, nn.Parameter) and is_mask(node),
                )
            elif node.op == "call_module" and str(node.target).partition(".")[0] not in HELD:
                part = owner.get_submodule(str(node.target))
                for name, value in (*part.named_parameters(), *part.named_buffers()):
                    yield f"{prefix}{node.target}.{name}", value, program.describe(node), False


def _multiplies_by_zero(user: fx.Node, value: fx.Node) -> bool:
    """True if an op scales a tensor by zero: torch does not read it then."""
    is_added = user.args[:1] == (value,) and value not in user.args[1:]
    return is_added and op_name(user) in ADDING and argument(user, "beta") == 0


def _fault(name: str, tensor: Tensor, where: str, *, learns: bool) -> DataError | TrainingError:
    what = f"{count_not_finite(tensor)} of {tensor.numel()} values of {name} are NaN or infinite"
    if learns:
        advice = "training has diverged: go on from an earlier state, with a lower learning rate"
        return TrainingError(what, where=where, advice=advice)
    return DataError(what, where=where, advice="correct the model: what it was trained or loaded with")
