"""Legalization of single ops for XNNPACK's partitioner, which matches ops by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import fx

from quantc.ir.dialect import WEIGHTED, argument, is_op, op_name, ops_in
from quantc.ir.op_row import Family
from quantc.ir.program import Program, Stage
from quantc.ir.types import TensorType, tensor_type
from quantc.pipeline.pipeline import Outcome, Pass, Preserves
from quantc.qdq import choose_qparams as run_time
from quantc.qdq.ops import is_dequantize, is_quantize
from quantc.qdq.registration import decomposed_ops

aten = torch.ops.aten
UNSIGNED = 128
"""uint8 is int8 shifted by this, exactly."""
BYTE = (-128, 127)
IMAGE = 4
"""Number of axes of a batch of images."""
FARTHEST = float(torch.finfo(torch.float32).max)
"""The end of a clamp that has none: beyond it there is infinity alone."""
SINGLE_MOVES = (aten.reshape.default, aten.permute_copy.default, aten.slice.Tensor)
"""Ops of the delegate that yield elements of their input, as they are."""


class LegalizeXnnpack(Pass):
    """Write ops as XNNPACK's partitioner knows them: it matches them by name.

    It fuses `hardtanh` but not `clamp` as an epilogue; it knows `reshape` of all views; it computes on int8, not uint8,
    and clamps to the full range of int8, whatever a quantize op says: a clamp comes before one that says less. It finds
    scales of rows itself where it sees torch's op for that, and where one was meant for a whole tensor too, which is
    closer to the float model and told in a warning. It rounds a bias to the first product that reads it: each gets its
    own. Transposed levels lie in order, copies of them are left out, and constants of norms have names that begin with
    a letter. A mean over images of which any number may come is a pool: its int8 mean reads memory that is not its own.
    """

    name: ClassVar[str] = "legalize-xnnpack"
    needs: ClassVar[Stage] = Stage.CANONICAL
    before: ClassVar[Stage | None] = Stage.LOWERED
    preserves: ClassVar[Preserves] = Preserves.CLOSELY

    def run(self, program: Program) -> Outcome:
        counts = dict.fromkeys((what for _, _, what in SPELLINGS), 0)
        for node in list(program.nodes()):
            for is_meant, written, what in SPELLINGS:
                if not node._erased and node.op == "call_function" and is_meant(node):
                    counts[what] += written(program, node)
        if changed := any(counts.values()):
            program.touch()
        return Outcome(changed, tuple(f"{count} {what}" for what, count in counts.items() if count))


# -- clamps --------------------------------------------------------------------------------------------------------


def _is_clamp(node: fx.Node) -> bool:
    return is_op(node, "clamp")


def _hardtanh(program: Program, node: fx.Node) -> bool:
    low, high = argument(node, "min"), argument(node, "max")
    if not all(isinstance(end, int | float | None) for end in (low, high)) or low is high is None:
        return False
    if low == 0 and high is None:
        node.target, node.args, node.kwargs = aten.relu.default, (node.args[0],), {}
        return True
    ends = (-FARTHEST if low is None else low, FARTHEST if high is None else high)
    node.target, node.args, node.kwargs = aten.hardtanh.default, (node.args[0], *ends), {}
    return True


# -- whole tensors -------------------------------------------------------------------------------------------------


def _is_of_tensor(node: fx.Node) -> bool:
    return (is_quantize(node) or is_dequantize(node)) and "per_tensor" in str(node.target)


def _signed(program: Program, node: fx.Node) -> bool:
    """uint8 as int8."""
    given: Any = node.args
    value, scale, zero_point, low, high, dtype = given
    if dtype is not torch.uint8 or not isinstance(zero_point, int):
        return False
    levels = program.tensor(value) if is_dequantize(node) else None
    if levels is not None:
        value = program.constant(f"{value.target}_signed", (levels.int() - UNSIGNED).to(torch.int8), before=node)
    node.args = (value, scale, zero_point - UNSIGNED, low - UNSIGNED, high - UNSIGNED, torch.int8)
    kind = tensor_type(node)
    if is_quantize(node) and kind is not None:
        node.meta["val"] = TensorType(torch.int8, kind.shape)
    return True


def _clipped(program: Program, node: fx.Node) -> bool:
    """Insert a clamp before a quantize op whose range is narrower than the delegate's, unless what it reads is in it."""
    given: Any = node.args
    value, scale, zero_point, low, high, dtype = given
    if not is_quantize(node) or dtype is not torch.int8 or (low, high) == BYTE or not isinstance(zero_point, int):
        return False
    ends = [(end - zero_point) * scale for end in (low, high)]
    if _is_on_grid(value, node.args[1:]) or (value.target is aten.hardtanh.default and [*value.args[1:]] == ends):
        return False
    node.replace_input_with(value, program.emit(aten.hardtanh.default, (value, *ends), before=node, like=value))
    return True


def _is_on_grid(value: fx.Node, grid: tuple[Any, ...]) -> bool:
    """True if a value is moved levels of that grid, brought back to float."""
    while value.target in SINGLE_MOVES:
        value = value.all_input_nodes[0]
    return is_dequantize(value) and value.args[1:] == grid


# -- shapes --------------------------------------------------------------------------------------------------------

VIEWS = ops_in(Family.VIEW, overloads=True)
COPIES = ops_in(Family.COPY)


def _is_view(node: fx.Node) -> bool:
    return is_op(node, *VIEWS) or op_name(node) in VIEWS


def _reshaped(program: Program, node: fx.Node) -> bool:
    """Any view as a reshape to sizes that are known, but for one."""
    kind = tensor_type(node)
    if kind is None or sum(isinstance(size, str) for size in kind.shape) > 1:
        return False
    shape = [size if isinstance(size, int) else -1 for size in kind.shape]
    given = (node.target, *node.args[1:])
    if 0 in shape or given == (aten.reshape.default, shape):
        return False
    node.target, node.args, node.kwargs = aten.reshape.default, (node.args[0], shape), {}
    return True


def _is_copy_of_levels(node: fx.Node) -> bool:
    return is_op(node, *COPIES) and is_dequantize(node.all_input_nodes[0])


def _left_out(program: Program, node: fx.Node) -> bool:
    program.forward(node, node.all_input_nodes[0])
    return True


# -- scales that are found as the program runs ---------------------------------------------------------------------


def _is_choice_by_row(node: fx.Node) -> bool:
    if node.target is not run_time.CHOOSE:
        return False
    _, per_token, zero_point, low, high, _ = node.args
    return bool(per_token) and zero_point is None and (low, high) == BYTE


def _is_choice_for_all(node: fx.Node) -> bool:
    return node.target is decomposed_ops().choose_qparams.tensor


def _told_of_rows(program: Program, node: fx.Node) -> bool:
    """XNNPACK has no run-time scale for a whole tensor. Its own are finer: nothing is lost, but it is another number."""
    source = node.all_input_nodes[0]
    kind = tensor_type(source)
    is_image = kind is not None and kind.rank == IMAGE
    lead = (1,) if kind is None else kind.shape[:1] if is_image else kind.shape[:-1]
    if any(size != 1 for size in lead):
        each = "image" if is_image else "row"
        warnings.warn(
            f"{program.describe(source)}: XNNPACK finds a scale for each {each} as it runs, where the Q/DQ form finds one "
            "for all, so that its results are closer to the float model's; INT8_TOKEN has a scale for each row",
            stacklevel=2,
        )
    return False


def _by_row(program: Program, node: fx.Node) -> bool:
    node.target = decomposed_ops().choose_qparams_per_token_asymmetric.default
    node.args = (node.args[0], torch.int8)
    return True


def _is_transposed(node: fx.Node) -> bool:
    return is_op(node, "transpose", "permute") and is_dequantize(node.all_input_nodes[0])


def _moved(program: Program, node: fx.Node) -> bool:
    """A transpose whose result lies in order: a reshape of it is then a view, and needs no copy in between."""
    kind = tensor_type(node)
    if kind is None:
        return False
    order = list(range(kind.rank))
    if is_op(node, "transpose"):
        first, second = (int(argument(node, name)) % kind.rank for name in ("dim0", "dim1"))
        order[first], order[second] = second, first
    else:
        order = [int(axis) % kind.rank for axis in argument(node, "dims")]
    node.target, node.args, node.kwargs = aten.permute_copy.default, (node.args[0], order), {}
    return True


# -- biases --------------------------------------------------------------------------------------------------------


def _shares_bias(node: fx.Node) -> bool:
    bias = argument(node, "b") if is_op(node, *WEIGHTED) else None
    return isinstance(bias, fx.Node) and bias.op == "get_attr" and len(bias.users) > 1


def _own_bias(program: Program, node: fx.Node) -> bool:
    """XNNPACK rounds a bias to steps of the first product that reads it: each product gets its own."""
    bias = argument(node, "b")
    values = program.tensor(bias)
    if values is None:
        return False
    own = program.constant(f"{bias.target}_of_{node.name}", values.detach().clone(), before=node)
    node.replace_input_with(bias, own)
    return True


# -- norms ---------------------------------------------------------------------------------------------------------


def _is_batch_norm(node: fx.Node) -> bool:
    return is_op(node, "batch_norm") and not argument(node, "training")


def _nameable(program: Program, node: fx.Node) -> bool:
    """XNNPACK makes a convolution of it, by constants that it names after these; a name that begins with a digit is lost."""
    renamed = False
    for source in node.all_input_nodes:
        values = program.tensor(source) if source.op == "get_attr" else None
        if values is not None and str(source.target)[0].isdigit():
            own = program.constant(f"of_{node.name}_{source.target}", values.detach().clone(), before=node)
            node.replace_input_with(source, own)
            renamed = True
    return renamed


# -- means ---------------------------------------------------------------------------------------------------------

OVER_IMAGE = ({2, 3}, {-2, -1})


def is_mean_of_any_number(node: fx.Node) -> bool:
    """True if a node is a mean over images with a dynamic batch size."""
    if is_op(node, "mean"):
        is_whole = set(argument(node, "dim") or ()) in OVER_IMAGE and bool(argument(node, "keepdim"))
    else:
        is_whole = is_op(node, "adaptive_avg_pool2d") and list(argument(node, "output_size")) in ([1, 1], [1])
    kind = tensor_type(node.all_input_nodes[0]) if is_whole else None
    if kind is None or kind.rank != IMAGE or not is_dequantize(node.all_input_nodes[0]):
        return False
    return isinstance(kind.shape[0], str) and all(isinstance(size, int) for size in kind.shape[2:])


def _pooled(program: Program, node: fx.Node) -> bool:
    """As a pool, which the delegate computes in float. Its int8 mean reads memory that is not its own where a batch is
    larger than those before (ExecuTorch 1.4.1); a file that is used elsewhere would yield other numbers there."""
    source = node.all_input_nodes[0]
    kind = tensor_type(source)
    if kind is None:
        return False
    sizes = [int(size) for size in kind.shape[2:]]
    node.target, node.args, node.kwargs = aten.avg_pool2d.default, (source, sizes, sizes, [0, 0], False, False), {}
    return True


SPELLINGS: tuple[tuple[Callable[[fx.Node], bool], Callable[[Program, fx.Node], bool], str], ...] = (
    (_is_clamp, _hardtanh, "clamps written as hardtanh or relu"),
    (_is_view, _reshaped, "views written as reshape"),
    (_is_copy_of_levels, _left_out, "copies of levels left out"),
    (_is_transposed, _moved, "transposed levels laid in order"),
    (_shares_bias, _own_bias, "shared biases stored for each reader"),
    (_is_batch_norm, _nameable, "norms given constants with other names"),
    (is_mean_of_any_number, _pooled, "means over any number of images written as pools"),
    (_is_of_tensor, _signed, "quantize and dequantize ops written for int8"),
    (_is_of_tensor, _clipped, "clamps before a narrow range"),
    (_is_choice_by_row, _by_row, "scales of rows left to the delegate"),
    (_is_choice_for_all, _told_of_rows, ""),
)
"""Rewrites: condition, function, note."""
