"""Legalization for XNNPACK's partitioner. Values stay the same; the delegate matches ops by name.

It fuses `hardtanh` but not `clamp` as an epilogue; it finds per-row scales itself where it sees torch's op for that; it
knows `reshape` of all views, `slice` of all partial reads, `bmm` of all matmuls; it computes on int8, not uint8; and it
clamps to the full int8 range, whatever a quantize op says.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from quantc.ir.dialect import WEIGHTED, argument, is_op, op_name, ops_in
from quantc.ir.op_row import Family
from quantc.ir.program import Program
from quantc.ir.types import TensorType, tensor_type
from quantc.qdq import choose_qparams as run_time
from quantc.qdq.ops import is_dequantize, is_quantize
from quantc.qdq.registration import decomposed_ops
from quantc.targets.executorch.legalize_bmm import (
    delay_reshapes,
    flatten_batch_axes,
    has_number,
    is_stack_product,
    with_tensor,
)
from quantc.targets.executorch.legalize_slices import is_cut, replace_by_slices
from quantc.targets.executorch.unroll_recurrent import STEPS, unrolled_loop
from quantc.targets.executorch.weight_only_ops import (
    by_rows,
    in_float,
    is_conv_alone,
    is_grouped,
    is_linear_alone,
    split_bias_add,
)

aten = torch.ops.aten
UNSIGNED = 128
"""uint8 is int8 shifted by this, exactly."""
BYTE = (-128, 127)
IMAGE = 4
"""How many axes a batch of images has."""
FARTHEST = float(torch.finfo(torch.float32).max)
"""The end of a clamp that has none: beyond it there is infinity alone."""
QMIN = 3
"""Where the range begins among the arguments of the ops for whole tensors: tensor, scale, zero point, range, dtype."""


def spell(program: Program) -> None:
    """Legalize a program that the caller owns."""
    for _, graph in program.graphs():
        for node in list(graph.nodes):
            for is_meant, respelled in SPELLINGS:
                if node.op == "call_function" and is_meant(node):
                    respelled(program, node)
    delay_reshapes(program)
    program.touch()


# -- clamps --------------------------------------------------------------------------------------------------------


def _is_clamp(node: fx.Node) -> bool:
    return is_op(node, "clamp")


def _hardtanh(program: Program, node: fx.Node) -> None:
    low, high = argument(node, "min"), argument(node, "max")
    if not all(isinstance(end, int | float | None) for end in (low, high)) or low is high is None:
        return
    if low == 0 and high is None:
        node.target, node.args, node.kwargs = aten.relu.default, (node.args[0],), {}
        return
    ends = (-FARTHEST if low is None else low, FARTHEST if high is None else high)
    node.target, node.args, node.kwargs = aten.hardtanh.default, (node.args[0], *ends), {}


# -- whole tensors -------------------------------------------------------------------------------------------------


def _is_of_tensor(node: fx.Node) -> bool:
    return (is_quantize(node) or is_dequantize(node)) and "per_tensor" in str(node.target)


def _signed(program: Program, node: fx.Node) -> None:
    """uint8 as int8."""
    given: Any = node.args
    value, scale, zero_point, low, high, dtype = given
    if dtype is not torch.uint8 or not isinstance(zero_point, int):
        return
    levels = program.tensor(value) if is_dequantize(node) else None
    if levels is not None:
        value = program.constant(f"{value.target}_signed", (levels.int() - UNSIGNED).to(torch.int8), before=node)
    node.args = (value, scale, zero_point - UNSIGNED, low - UNSIGNED, high - UNSIGNED, torch.int8)
    kind = tensor_type(node)
    if is_quantize(node) and kind is not None:
        node.meta["val"] = TensorType(torch.int8, kind.shape)


def _clipped(program: Program, node: fx.Node) -> None:
    """Insert a clamp before a quantize op whose range is narrower than the delegate's."""
    given: Any = node.args
    value, scale, zero_point, low, high, dtype = given
    if not is_quantize(node) or dtype is not torch.int8 or (low, high) == BYTE or not isinstance(zero_point, int):
        return
    ends = [(end - zero_point) * scale for end in (low, high)]
    node.replace_input_with(value, program.emit(aten.hardtanh.default, (value, *ends), before=node, like=value))


# -- shapes --------------------------------------------------------------------------------------------------------

VIEWS = ops_in(Family.VIEW, overloads=True)
COPIES = ops_in(Family.COPY)


def _is_view(node: fx.Node) -> bool:
    return is_op(node, *VIEWS) or op_name(node) in VIEWS


def _reshaped(program: Program, node: fx.Node) -> None:
    """Any view as a reshape to sizes that are known, but for one."""
    kind = tensor_type(node)
    if kind is None or sum(isinstance(size, str) for size in kind.shape) > 1:
        return
    shape = [size if isinstance(size, int) else -1 for size in kind.shape]
    if 0 not in shape:
        node.target, node.args, node.kwargs = aten.reshape.default, (node.args[0], shape), {}


def _is_copy_of_levels(node: fx.Node) -> bool:
    return is_op(node, *COPIES) and is_dequantize(node.all_input_nodes[0])


def _left_out(program: Program, node: fx.Node) -> None:
    program.forward(node, node.all_input_nodes[0])


# -- scales that are found as the program runs ---------------------------------------------------------------------


def _is_choice_by_row(node: fx.Node) -> bool:
    if node.target is not run_time.CHOOSE:
        return False
    _, per_token, zero_point, low, high, _ = node.args
    return bool(per_token) and zero_point is None and (low, high) == BYTE


def _is_choice_for_all(node: fx.Node) -> bool:
    return node.target is decomposed_ops().choose_qparams.tensor


def _told_of_rows(program: Program, node: fx.Node) -> None:
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


def _by_row(program: Program, node: fx.Node) -> None:
    node.target = decomposed_ops().choose_qparams_per_token_asymmetric.default
    node.args = (node.args[0], torch.int8)


def _is_transposed(node: fx.Node) -> bool:
    return is_op(node, "transpose", "permute") and is_dequantize(node.all_input_nodes[0])


def _moved(program: Program, node: fx.Node) -> None:
    """A transpose whose result lies in order: a reshape of it is then a view, and needs no copy in between."""
    kind = tensor_type(node)
    if kind is None:
        return
    order = list(range(kind.rank))
    if is_op(node, "transpose"):
        first, second = (int(argument(node, name)) % kind.rank for name in ("dim0", "dim1"))
        order[first], order[second] = second, first
    else:
        order = [int(axis) % kind.rank for axis in argument(node, "dims")]
    node.target, node.args, node.kwargs = aten.permute_copy.default, (node.args[0], order), {}


# -- biases --------------------------------------------------------------------------------------------------------


def _shares_bias(node: fx.Node) -> bool:
    bias = argument(node, "b") if is_op(node, *WEIGHTED) else None
    return isinstance(bias, fx.Node) and bias.op == "get_attr" and len(bias.users) > 1


def _own_bias(program: Program, node: fx.Node) -> None:
    """XNNPACK rounds a bias to steps of the first product that reads it: each product gets its own."""
    bias = argument(node, "b")
    values = program.tensor(bias)
    if values is not None:
        own = program.constant(f"{bias.target}_of_{node.name}", values.detach().clone(), before=node)
        node.replace_input_with(bias, own)


# -- norms ---------------------------------------------------------------------------------------------------------


def _is_batch_norm(node: fx.Node) -> bool:
    return is_op(node, "batch_norm") and not argument(node, "training")


def _nameable(program: Program, node: fx.Node) -> None:
    """XNNPACK makes a convolution of it, by constants that it names after these; a name that begins with a digit is lost."""
    for source in node.all_input_nodes:
        values = program.tensor(source) if source.op == "get_attr" else None
        if values is not None and str(source.target)[0].isdigit():
            own = program.constant(f"of_{node.name}_{source.target}", values.detach().clone(), before=node)
            node.replace_input_with(source, own)


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


def _pooled(program: Program, node: fx.Node) -> None:
    """As a pool, which the delegate computes in float. Its int8 mean reads memory that is not its own where a batch is
    larger than those before (ExecuTorch 1.4.1); a file that is used elsewhere would yield other numbers there."""
    source = node.all_input_nodes[0]
    kind = tensor_type(source)
    if kind is not None:
        sizes = [int(size) for size in kind.shape[2:]]
        node.target, node.args, node.kwargs = aten.avg_pool2d.default, (source, sizes, sizes, [0, 0], False, False), {}


# -- tables and layers ---------------------------------------------------------------------------------------------


def _is_lookup(node: fx.Node) -> bool:
    """An embedding whose table is quantized row by row."""
    if not is_op(node, "embedding"):
        return False
    table = argument(node, "w")
    return is_dequantize(table) and "per_channel." in str(table.target) and table.args[3] == 0


def _rows_looked_up(program: Program, node: fx.Node) -> None:
    """ExecuTorch has a kernel that dequantizes only the rows it looks up."""
    levels, scales, zero_points, _, low, high, _ = argument(node, "w").args
    offsets = program.tensor(zero_points)
    given = None
    if offsets is not None and bool(offsets.any()):
        given = program.constant(f"{zero_points.target}_float", offsets.float(), before=node)
    node.args, node.kwargs = (levels, scales, given, low, high, argument(node, "indices")), {}
    node.target = decomposed_ops().embedding_byte.default


def _is_recurrent(node: fx.Node) -> bool:
    return is_op(node, *STEPS) and not argument(node, "train")


def _looped(program: Program, node: fx.Node) -> None:
    """A recurrent layer as a loop; the exporter looks into it."""
    names = ("x", "hx", "params", "has_biases", "num_layers", "dropout", "train", "bidirectional", "batch_first")
    node.args, node.kwargs = tuple(argument(node, name) for name in names), {}
    node.target = unrolled_loop(op_name(node))


SPELLINGS: tuple[tuple[Callable[[fx.Node], bool], Callable[[Program, fx.Node], None]], ...] = (
    (_is_clamp, _hardtanh),
    (is_cut, replace_by_slices),
    (is_stack_product, flatten_batch_axes),
    (has_number, with_tensor),
    (_is_view, _reshaped),
    (_is_copy_of_levels, _left_out),
    (_is_transposed, _moved),
    (_shares_bias, _own_bias),
    (_is_batch_norm, _nameable),
    (is_mean_of_any_number, _pooled),
    (_is_of_tensor, _signed),
    (_is_of_tensor, _clipped),
    (_is_choice_by_row, _by_row),
    (_is_choice_for_all, _told_of_rows),
    (is_grouped, by_rows),
    (is_linear_alone, split_bias_add),
    (is_conv_alone, in_float),
    (_is_lookup, _rows_looked_up),
    (_is_recurrent, _looped),
)
"""What is written otherwise, and how."""
