"""Canonicalization of ATen's alternative spellings to those of the dialect.

`SPELLINGS` maps an overload to a function `(program, node) -> node | None`: the replacement, or None if the spelling
cannot be changed without more information. Operands have been rewritten already when a node's turn comes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from torch import fx
from torch._ops import OpOverload, OpOverloadPacket

from quantc.ir.dialect import BY_NAME, OPS, aten, is_op, overload_names
from quantc.ir.program import Program
from quantc.ir.types import TensorType, dtype_of, rank_of, tensor_type
from quantc.rewrite.normal_form import is_item

Spelling = Callable[[Program, fx.Node], fx.Node | None]
SPELLINGS: dict[OpOverload, Spelling] = {}


def spelling(*targets: OpOverload) -> Callable[[Spelling], Spelling]:
    """Register a rewrite for these overloads."""

    def register(function: Spelling) -> Spelling:
        SPELLINGS.update(dict.fromkeys(targets, function))
        return function

    return register


LITERAL = re.compile(r"^(lifted_tensor_|_tensor_constant|const_)\d+$")


def is_literal(target: str) -> bool:
    """True if a constant was written in the code, rather than being state of the model."""
    return LITERAL.match(target) is not None


def argument(node: fx.Node, index: int, default: Any = None) -> Any:
    return node.args[index] if index < len(node.args) else default


def respell(program: Program, node: fx.Node, target: OpOverload, *args: Any, **kwargs: Any) -> fx.Node:
    """Insert a call with the same result type as `node`."""
    return program.emit(target, args, kwargs, before=node, like=node)


# -- the same op under another name ------------------------------------------------------------------------------

ALIASES: dict[str, str] = {
    "moveaxis": "movedim",
    "greater": "gt",
    "greater_equal": "ge",
    "less": "lt",
    "less_equal": "le",
    "not_equal": "ne",
    "__and__": "bitwise_and",
    "__or__": "bitwise_or",
    "__xor__": "bitwise_xor",
}
"""Of ops without a row; the others have theirs in it."""


def _rename(target: OpOverload) -> Spelling:
    def rewrite(program: Program, node: fx.Node) -> fx.Node:
        args = node.args[:2] if target is aten.reshape.default else node.args
        return respell(program, node, target, *args, **node.kwargs)

    return rewrite


def _view_and_copy(target: OpOverload) -> Spelling:
    """Rewrite a copying variant as the view and a copy of it; the copy is removed if it is not observable."""

    def rewrite(program: Program, node: fx.Node) -> fx.Node:
        view = respell(program, node, target, *node.args, **node.kwargs)
        return respell(program, node, aten.clone.default, view)

    return rewrite


COPIED_PARTS: set[OpOverload] = set()
"""Variants that return copies of several parts. As views they are equivalent only if nothing is written."""


def _register_copies() -> None:
    for op in BY_NAME.values():
        copying = getattr(aten, f"{op.target._schema.name.removeprefix('aten::')}_copy", None)
        if not isinstance(copying, OpOverloadPacket) or op.target._overloadname not in overload_names(copying):
            continue
        source = getattr(copying, op.target._overloadname)
        if str(op.target._schema.returns[0].type) == "Tensor":
            SPELLINGS[source] = _view_and_copy(op.target)
        else:
            SPELLINGS[source] = _rename(op.target)
            COPIED_PARTS.add(source)
    SPELLINGS[aten.view_copy.default] = _view_and_copy(aten.reshape.default)
    SPELLINGS[aten.t_copy.default] = _view_and_copy(aten.t.default)


def _register_aliases() -> None:
    rows: list[tuple[str, OpOverload | None, OpOverloadPacket]] = [
        (alias, op.target, op.target.overloadpacket) for op in OPS for alias in op.aliases
    ]
    rows += [(alias, None, getattr(aten, name)) for alias, name in ALIASES.items()]
    for alias, usual, packet in rows:
        for name in overload_names(getattr(aten, alias)):
            source, target = getattr(getattr(aten, alias), name), getattr(packet, name, usual)
            if isinstance(target, OpOverload) and not source._schema.is_mutable and "dtype" not in name:
                SPELLINGS[source] = _rename(target)


_register_aliases()
_register_copies()


@spelling(aten.add.Scalar, aten.sub.Scalar, aten.mul.Scalar, aten.div.Scalar)
def _scalar(program: Program, node: fx.Node) -> fx.Node:
    packet = node.target.overloadpacket  # type: ignore[union-attr]
    kwargs = {"alpha": node.args[2]} if len(node.args) > 2 else dict(node.kwargs)
    return respell(program, node, packet.Tensor, *node.args[:2], **kwargs)


@spelling(aten.rsub.Tensor)
def _reversed_sub(program: Program, node: fx.Node) -> fx.Node | None:
    if node.kwargs or len(node.args) > 2:
        return None
    x, y = argument(node, 0), argument(node, 1)
    return respell(program, node, aten.sub.Tensor, y, x)


@spelling(aten.fill_.Tensor, aten.fill.Tensor)
def _fill(program: Program, node: fx.Node) -> fx.Node | None:
    """Fill with a number written in the code, which export stores as a tensor."""
    source = node.args[1]
    value = program.tensor(source) if isinstance(source, fx.Node) else None
    if value is None or value.dim() or not is_literal(str(source.target)):  # type: ignore[union-attr]
        return None
    packet = node.target.overloadpacket  # type: ignore[union-attr]
    return respell(program, node, packet.Scalar, node.args[0], value.item())


@spelling(aten.square.default)
def _square(program: Program, node: fx.Node) -> fx.Node:
    return respell(program, node, aten.pow.Tensor_Scalar, node.args[0], 2)


# -- clamps ------------------------------------------------------------------------------------------------------


def _is_integer(node: fx.Node) -> bool:
    """True if the first operand is known to hold no floats: `clamp` with a float would make some of it."""
    dtype = dtype_of(node.args[0])
    return dtype is not None and not dtype.is_floating_point


@spelling(aten.hardtanh.default)
def _hardtanh(program: Program, node: fx.Node) -> fx.Node | None:
    if _is_integer(node):
        return None
    return respell(program, node, aten.clamp.default, node.args[0], argument(node, 1, -1.0), argument(node, 2, 1.0))


@spelling(aten.relu6.default)
def _relu6(program: Program, node: fx.Node) -> fx.Node | None:
    if _is_integer(node):
        return None
    return respell(program, node, aten.clamp.default, node.args[0], 0.0, 6.0)


@spelling(aten.clamp_min.default, aten.clamp_max.default, aten.clamp.default)
def _clamp(program: Program, node: fx.Node) -> fx.Node | None:
    low, high = argument(node, 1), argument(node, 2)
    if node.target is aten.clamp_max.default:
        low, high = None, low
    if high is None and low == 0 and not isinstance(low, fx.Node) and not _is_integer(node):
        return respell(program, node, aten.relu.default, node.args[0])
    if node.target is aten.clamp.default:
        return None
    return respell(program, node, aten.clamp.default, node.args[0], low, high)


# -- products ----------------------------------------------------------------------------------------------------


@spelling(aten.mm.default, aten.bmm.default)
def _matmul(program: Program, node: fx.Node) -> fx.Node:
    product = respell(program, node, aten.matmul.default, *node.args)
    return _linear_from_matmul(program, product) or product


def _transposed_constant(value: Any) -> fx.Node | None:
    """`w` where `value` is the transpose of a two-dimensional constant `w`."""
    if not is_op(value, "transpose") or not isinstance(value.args[0], fx.Node):
        return None
    source = value.args[0]
    swaps = {value.args[1], value.args[2]} in ({0, 1}, {-1, -2})
    return source if swaps and source.op == "get_attr" and rank_of(source) == 2 else None


@spelling(aten.matmul.default)
def _linear_from_matmul(program: Program, node: fx.Node) -> fx.Node | None:
    weight = _transposed_constant(node.args[1])
    if weight is None:
        return None
    return respell(program, node, aten.linear.default, node.args[0], weight)


@spelling(aten.addmm.default)
def _linear_from_addmm(program: Program, node: fx.Node) -> fx.Node | None:
    bias, x, y = node.args[:3]
    weight = _transposed_constant(y)
    is_scaled = any(node.kwargs.get(name, 1) != 1 for name in ("alpha", "beta"))
    if weight is None or is_scaled or rank_of(bias) != 1:
        return None
    return respell(program, node, aten.linear.default, x, weight, bias)


@spelling(aten.convolution.default, aten._convolution.default)
def _convolution(program: Program, node: fx.Node) -> fx.Node | None:
    x, w, b, stride, padding, dilation, transposed, output_padding, groups = node.args[:9]
    rank = rank_of(w)
    dims = rank - 2 if rank is not None else len(stride)  # type: ignore[arg-type]
    if dims not in (1, 2, 3) or not isinstance(stride, list | tuple):
        return None
    wide = [list(v) * dims if len(v) == 1 else list(v) for v in (stride, padding, dilation, output_padding)]  # type: ignore[arg-type]
    stride, padding, dilation, output_padding = wide
    if transposed:
        target = BY_NAME[f"conv_transpose{dims}d"].target
        return respell(program, node, target, x, w, b, stride, padding, output_padding, groups, dilation)
    return respell(program, node, BY_NAME[f"conv{dims}d"].target, x, w, b, stride, padding, dilation, groups)


@spelling(aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding)
def _padded_convolution(program: Program, node: fx.Node) -> fx.Node | None:
    """`padding="same"` needs the kernel size; an even kernel pads one side more, which ATen does by a pad."""
    x, w = node.args[:2]
    dims = int(node.target._schema.name[-2])  # type: ignore[union-attr]
    stride = argument(node, 3, [1] * dims)
    mode = argument(node, 4, "valid")
    dilation = argument(node, 5, [1] * dims)
    groups = argument(node, 6, 1)
    dilation = dilation * dims if len(dilation) == 1 else dilation
    target = BY_NAME[f"conv{dims}d"].target
    bias = argument(node, 2)
    if mode == "valid":
        return respell(program, node, target, x, w, bias, stride, [0] * dims, dilation, groups)
    weight = tensor_type(w)
    if weight is None or not all(isinstance(size, int) for size in weight.shape[2:]):
        return None
    total = [d * (int(size) - 1) for d, size in zip(dilation, weight.shape[2:], strict=True)]
    left = [t // 2 for t in total]
    extra = [t % 2 for t in total]
    if any(extra) and isinstance(x, fx.Node):
        pads = [amount for side in reversed(extra) for amount in (0, side)]
        x = program.emit(aten.pad.default, (x, pads), before=node, value=_pad_type(tensor_type(x), extra))
    return respell(program, node, target, x, w, bias, stride, left, dilation, groups)


def _pad_type(kind: TensorType | None, extra: list[int]) -> TensorType | None:
    if kind is None or not all(isinstance(size, int) for size in kind.shape[-len(extra) :]):
        return None
    sizes = [int(size) + more for size, more in zip(kind.shape[-len(extra) :], extra, strict=True)]
    return TensorType(kind.dtype, (*kind.shape[: -len(extra)], *sizes))


# -- moving values -----------------------------------------------------------------------------------------------


@spelling(aten.t.default, aten.numpy_T.default)
def _matrix_transpose(program: Program, node: fx.Node) -> fx.Node | None:
    rank = rank_of(node.args[0])
    if rank is None:
        return None
    if rank < 2:
        return node.args[0]  # type: ignore[return-value]
    if rank == 2:
        return respell(program, node, aten.transpose.int, node.args[0], 0, 1)
    return respell(program, node, aten.permute.default, node.args[0], list(reversed(range(rank))))


@spelling(aten.mT.default, aten.adjoint.default, aten.mH.default, aten.matrix_H.default)
def _last_two(program: Program, node: fx.Node) -> fx.Node | None:
    dtype = dtype_of(node.args[0])
    if node.target is not aten.mT.default and (dtype is None or dtype.is_complex):
        return None
    return respell(program, node, aten.transpose.int, node.args[0], -2, -1)


@spelling(aten.movedim.int, aten.movedim.intlist)
def _movedim(program: Program, node: fx.Node) -> fx.Node | None:
    rank = rank_of(node.args[0])
    if rank is None:
        return None
    sources, places = ([v] if isinstance(v, int) else list(v) for v in node.args[1:3])  # type: ignore[arg-type]
    order: list[int] = [-1] * rank
    for source, place in zip(sources, places, strict=True):
        order[place % rank] = source % rank
    rest = iter(dim for dim in range(rank) if dim not in order)
    filled = [dim if dim >= 0 else next(rest) for dim in order]
    permuted = respell(program, node, aten.permute.default, node.args[0], filled)
    return _permute(program, permuted) or permuted


@spelling(aten.permute.default)
def _permute(program: Program, node: fx.Node) -> fx.Node | None:
    """A permutation that swaps two dimensions is a transpose; the identity is removed."""
    dims = node.args[1]
    if not isinstance(dims, list | tuple) or not all(isinstance(dim, int) for dim in dims):
        return None
    order = [int(dim) % len(dims) for dim in dims]  # type: ignore[arg-type]
    moved = [index for index, dim in enumerate(order) if index != dim]
    if not moved:
        return node.args[0]  # type: ignore[return-value]
    if len(moved) == 2:
        return respell(program, node, aten.transpose.int, node.args[0], *moved)
    return None


@spelling(aten.expand_as.default, aten.view_as.default, aten.reshape_as.default)
def _like_other(program: Program, node: fx.Node) -> fx.Node | None:
    kind = tensor_type(node.args[1])
    if kind is None:
        return None
    if kind.is_static:
        target = aten.expand.default if node.target is aten.expand_as.default else aten.reshape.default
        return respell(program, node, target, node.args[0], list(kind.shape))
    sizes = [size if isinstance(size, int) else -1 for size in kind.shape]
    if node.target is aten.expand_as.default or sizes.count(-1) > 1 or 0 in sizes:
        return None
    return respell(program, node, aten.reshape.default, node.args[0], sizes)


@spelling(aten.squeeze.dims)
def _squeeze(program: Program, node: fx.Node) -> fx.Node | None:
    dims = node.args[1]
    return respell(program, node, aten.squeeze.dim, node.args[0], dims[0]) if len(dims) == 1 else None  # type: ignore[arg-type,index]


@spelling(aten.narrow.default)
def _narrow(program: Program, node: fx.Node) -> fx.Node | None:
    x, dim, start, length = node.args
    if not isinstance(start, int) or not isinstance(length, int) or start < 0:
        return None
    return respell(program, node, aten.slice.Tensor, x, dim, start, start + length)


@spelling(aten.split.sizes)
def _split_sizes(program: Program, node: fx.Node) -> fx.Node:
    return respell(program, node, aten.split_with_sizes.default, *node.args)


@spelling(aten.ravel.default)
def _ravel(program: Program, node: fx.Node) -> fx.Node:
    return respell(program, node, aten.flatten.using_ints, node.args[0])


# -- reductions --------------------------------------------------------------------------------------------------


@spelling(aten.mean.default)
def _mean(program: Program, node: fx.Node) -> fx.Node:
    return respell(program, node, aten.mean.dim, node.args[0], None, **node.kwargs)


@spelling(aten.sum.default)
def _sum(program: Program, node: fx.Node) -> fx.Node:
    return respell(program, node, aten.sum.dim_IntList, node.args[0], None, **node.kwargs)


@spelling(aten.std.default, aten.var.default, aten.std.dim, aten.var.dim)
def _std_var(program: Program, node: fx.Node) -> fx.Node:
    packet = node.target.overloadpacket  # type: ignore[union-attr]
    has_dim = node.target._overloadname == "dim"  # type: ignore[union-attr]
    dims = node.args[1] if has_dim else None
    flags = node.args[2:] if has_dim else node.args[1:]
    kwargs: dict[str, Any] = {}
    if flags and flags[0] is False:
        kwargs["correction"] = 0
    if len(flags) > 1 and flags[1]:
        kwargs["keepdim"] = True
    args = (node.args[0],) if dims is None else (node.args[0], dims)
    return respell(program, node, packet.correction, *args, **kwargs)


@spelling(aten._softmax.default, aten._log_softmax.default)
def _softmax(program: Program, node: fx.Node) -> fx.Node | None:
    if argument(node, 2, False):
        return None
    target = aten.softmax.int if node.target is aten._softmax.default else aten.log_softmax.int
    return respell(program, node, target, *node.args[:2])


@spelling(
    aten.upsample_nearest1d.default, aten.upsample_nearest2d.default, aten.upsample_nearest3d.default,
    aten.upsample_linear1d.default, aten.upsample_bilinear2d.default,
)  # fmt: skip
def _upsample(program: Program, node: fx.Node) -> fx.Node | None:
    x, size = node.args[0], list(node.args[1])  # type: ignore[arg-type]
    has_corners = "linear" in str(node.target)
    corners = (argument(node, 2, False),) if has_corners else ()
    scales = [scale for scale in node.args[2 + len(corners) :] if scale is not None]
    target = node.target.overloadpacket.vec  # type: ignore[union-attr]
    if not scales:
        return respell(program, node, target, x, size, *corners, None)
    kind = tensor_type(x)
    if kind is None or len(scales) != len(size) or not kind.is_static:
        return None
    derived = [math.floor(int(n) * float(s)) for n, s in zip(kind.shape[2:], scales, strict=True)]  # type: ignore[arg-type]
    if derived != size:
        return None
    return respell(program, node, target, x, None, *corners, [float(s) for s in scales])  # type: ignore[arg-type]


# -- ops that also return what inference does not need -----------------------------------------------------------


def _first_output_only(program: Program, node: fx.Node, target: OpOverload, *args: Any) -> fx.Node | None:
    """Replace `getitem(node, 0)`, the only output in use, by one call; the node then has no users."""
    if not node.users or not all(is_item(user, 0) for user in node.users):
        return None
    first = next(iter(node.users))
    call = program.emit(target, args, before=node, like=first)
    for user in list(node.users):
        program.replace(user, call)
    return call


@spelling(aten._native_batch_norm_legit_no_training.default)
def _inference_batch_norm(program: Program, node: fx.Node) -> fx.Node | None:
    *tensors, momentum, eps = node.args
    return _first_output_only(program, node, aten.batch_norm.default, *tensors, False, momentum, eps, False)


@spelling(aten.native_batch_norm.default, aten._native_batch_norm_legit.default)
def _native_batch_norm(program: Program, node: fx.Node) -> fx.Node | None:
    return _first_output_only(program, node, aten.batch_norm.default, *node.args[:8], False)


CUDNN: dict[Any, tuple[int, bool]] = {
    aten.batch_norm.default: (8, False),
    aten.instance_norm.default: (8, False),
    aten.layer_norm.default: (5, True),
    aten.group_norm.default: (5, True),
}
"""The cuDNN argument of a norm, and its value in the dialect."""


@spelling(*CUDNN)
def _norm_without_cudnn(program: Program, node: fx.Node) -> fx.Node | None:
    """Normalize the cuDNN flag: a setting of the machine at capture, not of the model."""
    index, usual = CUDNN[node.target]
    if argument(node, index, usual) is usual:
        return None
    return respell(program, node, node.target, *node.args[:index], usual)  # type: ignore[arg-type]


@spelling(aten.native_layer_norm.default)
def _native_layer_norm(program: Program, node: fx.Node) -> fx.Node | None:
    return _first_output_only(program, node, aten.layer_norm.default, *node.args[:5])


@spelling(aten.native_group_norm.default)
def _native_group_norm(program: Program, node: fx.Node) -> fx.Node | None:
    x, w, b, _, _, _, groups, eps = node.args
    return _first_output_only(program, node, aten.group_norm.default, x, groups, w, b, eps)


@spelling(aten.native_dropout.default)
def _native_dropout(program: Program, node: fx.Node) -> fx.Node | None:
    call = _first_output_only(program, node, aten.dropout.default, *node.args[:3])
    if call is not None:
        program.modes.move(node, call)
    return call


@spelling(
    aten.max_pool1d_with_indices.default, aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default
)
def _max_pool(program: Program, node: fx.Node) -> fx.Node | None:
    dims = node.target._schema.name.removeprefix("aten::max_pool")[0]  # type: ignore[union-attr]
    return _first_output_only(program, node, BY_NAME[f"max_pool{dims}d"].target, *node.args)


__all__ = ["COPIED_PARTS", "SPELLINGS", "spelling"]
