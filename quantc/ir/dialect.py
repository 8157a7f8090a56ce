"""The canonical dialect: the ATen overload of each op, and the names of its operands.

One table. Patterns, dumps, verification and the passes all name ops and operands through it, so `conv2d`'s weight is
`w` everywhere. ATen ops outside the table are still part of the dialect, under their full name (`aten.cumsum.default`)
and with ATen's argument names; they simply have no short name.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

aten = torch.ops.aten


class Trait(Enum):
    """A property of an op that passes may rely on."""

    COMMUTES = "the first two operands may be swapped"
    PRESERVES_VALUES = "every output element is an input element (or a zero/pad constant): no arithmetic"
    ELEMENTWISE = "output element i depends on input elements i alone"
    MODAL = "behaves differently in training and inference"


COMMUTES, KEEPS, EACH, MODAL = Trait.COMMUTES, Trait.PRESERVES_VALUES, Trait.ELEMENTWISE, Trait.MODAL


@dataclass(frozen=True, slots=True)
class Op:
    """One canonical op. `operands` names the leading arguments; the others keep their ATen names."""

    name: str
    target: OpOverload
    operands: tuple[str, ...]
    traits: frozenset[Trait]


def _op(name: str, target: OpOverload, operands: str = "x", *traits: Trait) -> Op:
    return Op(name, target, tuple(operands.split()), frozenset(traits))


DROPOUTS = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
"""The ops that drop elements in training."""

OPS: tuple[Op, ...] = (
    # matmul-like
    *(_op(f"conv{n}d", getattr(aten, f"conv{n}d").default, "x w b") for n in (1, 2, 3)),
    _op("conv_transpose1d", aten.conv_transpose1d.default, "x w b"),
    _op("conv_transpose2d", aten.conv_transpose2d.input, "x w b"),
    _op("conv_transpose3d", aten.conv_transpose3d.input, "x w b"),
    _op("linear", aten.linear.default, "x w b"),
    _op("bilinear", aten.bilinear.default, "x y w b"),
    _op("matmul", aten.matmul.default, "x y"),
    _op("addmm", aten.addmm.default, "b x y"),
    _op("baddbmm", aten.baddbmm.default, "b x y"),
    _op("einsum", aten.einsum.default, "equation operands"),
    _op("sdpa", aten.scaled_dot_product_attention.default, "q k v mask", MODAL),
    _op("embedding", aten.embedding.default, "w indices"),
    _op("embedding_bag", aten.embedding_bag.padding_idx, "w indices offsets"),
    _op("lstm", aten.lstm.input, "x hx params", MODAL),
    _op("gru", aten.gru.input, "x hx params", MODAL),
    _op("rnn_tanh", aten.rnn_tanh.input, "x hx params", MODAL),
    _op("rnn_relu", aten.rnn_relu.input, "x hx params", MODAL),
    _op("lstm_cell", aten.lstm_cell.default, "x hx w_ih w_hh b_ih b_hh"),
    _op("gru_cell", aten.gru_cell.default, "x hx w_ih w_hh b_ih b_hh"),
    _op("rnn_tanh_cell", aten.rnn_tanh_cell.default, "x hx w_ih w_hh b_ih b_hh"),
    _op("rnn_relu_cell", aten.rnn_relu_cell.default, "x hx w_ih w_hh b_ih b_hh"),
    # binary arithmetic
    _op("add", aten.add.Tensor, "x y", COMMUTES, EACH),
    _op("sub", aten.sub.Tensor, "x y", EACH),
    _op("rsub", aten.rsub.Scalar, "x y", EACH),
    _op("mul", aten.mul.Tensor, "x y", COMMUTES, EACH),
    _op("div", aten.div.Tensor, "x y", EACH),
    _op("pow", aten.pow.Tensor_Scalar, "x exponent", EACH),
    _op("maximum", aten.maximum.default, "x y", COMMUTES, EACH),
    _op("minimum", aten.minimum.default, "x y", COMMUTES, EACH),
    _op("where", aten.where.self, "condition x y", EACH),
    _op("masked_fill", aten.masked_fill.Scalar, "x mask value", EACH),
    # activations
    _op("relu", aten.relu.default, "x", EACH),
    _op("clamp", aten.clamp.default, "x min max", EACH),
    _op("hardswish", aten.hardswish.default, "x", EACH),
    _op("hardsigmoid", aten.hardsigmoid.default, "x", EACH),
    _op("silu", aten.silu.default, "x", EACH),
    _op("mish", aten.mish.default, "x", EACH),
    _op("gelu", aten.gelu.default, "x", EACH),
    _op("leaky_relu", aten.leaky_relu.default, "x", EACH),
    _op("elu", aten.elu.default, "x", EACH),
    _op("selu", aten.selu.default, "x", EACH),
    _op("celu", aten.celu.default, "x", EACH),
    _op("prelu", aten.prelu.default, "x w"),
    _op("sigmoid", aten.sigmoid.default, "x", EACH),
    _op("tanh", aten.tanh.default, "x", EACH),
    _op("softplus", aten.softplus.default, "x", EACH),
    _op("glu", aten.glu.default, "x"),
    _op("softmax", aten.softmax.int, "x dim"),
    _op("log_softmax", aten.log_softmax.int, "x dim"),
    *(
        _op(name, getattr(aten, name).default, "x", EACH)
        for name in ("neg", "abs", "exp", "log", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "erf")
    ),
    # normalisation and dropout
    _op("batch_norm", aten.batch_norm.default, "x w b mean var", MODAL),
    _op("instance_norm", aten.instance_norm.default, "x w b mean var", MODAL),
    _op("layer_norm", aten.layer_norm.default, "x normalized_shape w b"),
    _op("group_norm", aten.group_norm.default, "x num_groups w b"),
    _op("rms_norm", aten.rms_norm.default, "x normalized_shape w"),
    _op("dropout", aten.dropout.default, "x", MODAL),
    _op("feature_dropout", aten.feature_dropout.default, "x", MODAL),
    _op("alpha_dropout", aten.alpha_dropout.default, "x", MODAL),
    _op("feature_alpha_dropout", aten.feature_alpha_dropout.default, "x", MODAL),
    # pooling, reduction
    *(_op(f"max_pool{n}d", getattr(aten, f"max_pool{n}d").default, "x", KEEPS) for n in (1, 2, 3)),
    _op("max_pool2d_with_indices", aten.max_pool2d_with_indices.default, "x"),
    *(_op(f"avg_pool{n}d", getattr(aten, f"avg_pool{n}d").default, "x") for n in (1, 2, 3)),
    *(_op(f"adaptive_avg_pool{n}d", getattr(aten, f"adaptive_avg_pool{n}d").default, "x") for n in (1, 2, 3)),
    _op("mean", aten.mean.dim, "x dim"),
    _op("sum", aten.sum.dim_IntList, "x dim"),
    _op("amax", aten.amax.default, "x dim"),
    _op("amin", aten.amin.default, "x dim"),
    _op("max", aten.max.dim, "x dim"),
    _op("min", aten.min.dim, "x dim"),
    _op("topk", aten.topk.default, "x"),
    # joining, splitting
    _op("cat", aten.cat.default, "xs", KEEPS),
    _op("stack", aten.stack.default, "xs", KEEPS),
    _op("split", aten.split.Tensor, "x", KEEPS),
    _op("split_sizes", aten.split_with_sizes.default, "x", KEEPS),
    _op("chunk", aten.chunk.default, "x", KEEPS),
    _op("unbind", aten.unbind.int, "x", KEEPS),
    # data movement
    _op("reshape", aten.reshape.default, "x shape", KEEPS),
    _op("flatten", aten.flatten.using_ints, "x", KEEPS),
    _op("unflatten", aten.unflatten.int, "x", KEEPS),
    _op("squeeze", aten.squeeze.dim, "x", KEEPS),
    _op("unsqueeze", aten.unsqueeze.default, "x", KEEPS),
    _op("transpose", aten.transpose.int, "x", KEEPS),
    _op("permute", aten.permute.default, "x dims", KEEPS),
    _op("expand", aten.expand.default, "x size", KEEPS),
    _op("repeat", aten.repeat.default, "x", KEEPS),
    _op("select", aten.select.int, "x", KEEPS),
    _op("slice", aten.slice.Tensor, "x", KEEPS),
    _op("narrow", aten.narrow.default, "x", KEEPS),
    _op("index", aten.index.Tensor, "x indices", KEEPS),
    _op("index_select", aten.index_select.default, "x dim index", KEEPS),
    _op("gather", aten.gather.default, "x dim index", KEEPS),
    _op("flip", aten.flip.default, "x", KEEPS),
    _op("roll", aten.roll.default, "x", KEEPS),
    _op("pad", aten.pad.default, "x", KEEPS),
    _op("pixel_shuffle", aten.pixel_shuffle.default, "x", KEEPS),
    _op("pixel_unshuffle", aten.pixel_unshuffle.default, "x", KEEPS),
    _op("channel_shuffle", aten.channel_shuffle.default, "x", KEEPS),
    _op("upsample_nearest1d", aten.upsample_nearest1d.vec, "x", KEEPS),
    _op("upsample_nearest2d", aten.upsample_nearest2d.vec, "x", KEEPS),
    _op("upsample_nearest3d", aten.upsample_nearest3d.vec, "x", KEEPS),
    _op("upsample_linear1d", aten.upsample_linear1d.vec, "x"),
    _op("upsample_bilinear2d", aten.upsample_bilinear2d.vec, "x"),
    _op("contiguous", aten.contiguous.default, "x", KEEPS),
    _op("clone", aten.clone.default, "x", KEEPS),
    _op("detach", aten.detach.default, "x", KEEPS),
    _op("cast", aten.to.dtype, "x dtype"),
    _op("sym_size", aten.sym_size.int, "x dim"),
)

BY_NAME: dict[str, Op] = {op.name: op for op in OPS}
BY_TARGET: dict[OpOverload, Op] = {op.target: op for op in OPS}


MEMORY_FORMATS = (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)
"""In ATen's numbering, which schema defaults use."""


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of an op: dialect name, ATen name, default, and width of an int list."""

    name: str
    aten_name: str
    type: str
    has_default: bool
    default: Any
    keyword_only: bool
    width: int | None
    """For `int[2]` and the like: the length that a lone number is expanded to."""
    is_written: bool


@cache
def arguments(target: OpOverload) -> tuple[Argument, ...]:
    """The arguments of an overload, operands first, under their dialect names."""
    op = BY_TARGET.get(target)
    names = op.operands if op is not None else ()
    rows = []
    for index, argument in enumerate(target._schema.arguments):
        width = argument.N if "List[int]" in str(argument.type) else None  # type: ignore[attr-defined]
        default = argument.default_value if argument.has_default_value() else None
        if width is not None and isinstance(default, int):
            default = [default] * width
        if str(argument.real_type) == "MemoryFormat" and isinstance(default, int):
            default = MEMORY_FORMATS[default]
        rows.append(
            Argument(
                name=names[index] if index < len(names) else argument.name,
                aten_name=argument.name,
                type=str(argument.real_type),
                has_default=argument.has_default_value(),
                default=default,
                keyword_only=argument.kwarg_only,
                width=width,
                is_written=argument.alias_info is not None and argument.alias_info.is_write,
            )
        )
    return tuple(rows)


@cache
def position(target: OpOverload, name: str) -> int:
    """The index of an argument by its dialect name (or ATen name); -1 if the op has no such argument."""
    for index, argument in enumerate(arguments(target)):
        if name in (argument.name, argument.aten_name):
            return index
    return -1


def argument(node: fx.Node, name: str) -> Any:
    """The value of a node's argument by name, defaults filled in. KeyError if the op has no such argument."""
    target = node.target
    if not isinstance(target, OpOverload):
        raise KeyError(f"{node.name} is not an ATen op, so it has no argument {name!r}")
    index = position(target, name)
    if index < 0:
        raise KeyError(f"{op_name(node)} has no argument {name!r}")
    row = arguments(target)[index]
    if row.aten_name in node.kwargs:
        return node.kwargs[row.aten_name]
    return node.args[index] if index < len(node.args) else row.default


@cache
def target_name(target: Any) -> str:
    """The name of a call target: short for canonical ops, `aten.cumsum.default` for other ops,
    `module:qualified.name` for Python functions."""
    if isinstance(target, OpOverload):
        op = BY_TARGET.get(target)
        return op.name if op is not None else str(target)
    if isinstance(target, HigherOrderOperator):
        return f"higher_order.{higher_order_name(target)}"
    module = getattr(target, "__module__", None) or "builtins"
    return f"{module.removeprefix('_')}:{getattr(target, '__qualname__', repr(target))}"


def overload_names(op: OpOverloadPacket) -> list[str]:
    """The names of an op's overloads."""
    return list(op.overloads())  # type: ignore[no-untyped-call]


def higher_order_name(target: HigherOrderOperator) -> str:
    return str(target.name())  # type: ignore[no-untyped-call]


@cache
def short_name(target: OpOverload) -> str:
    """The base of the name of nodes that call an overload: `conv2d`, `add`."""
    return target._schema.name.rpartition("::")[2].strip("_")


def op_name(node: fx.Node) -> str:
    """The operation of a node: an op's name, or `placeholder`, `get_attr`, `output`, `call_module`."""
    return target_name(node.target) if node.op == "call_function" else node.op


def traits_of(node: fx.Node) -> frozenset[Trait]:
    target = node.target
    op = BY_TARGET.get(target) if isinstance(target, OpOverload) else None
    return op.traits if op is not None else frozenset()


def is_op(node: Any, *names: str) -> bool:
    """True if `node` is a call of one of the named canonical ops."""
    if not isinstance(node, fx.Node) or not isinstance(node.target, OpOverload):
        return False
    op = BY_TARGET.get(node.target)
    return op is not None and op.name in names


@cache
def writes(target: Any) -> tuple[int, ...]:
    """The positions of the arguments an op writes to; empty for functional ops."""
    if not isinstance(target, OpOverload):
        return ()
    return tuple(index for index, row in enumerate(arguments(target)) if row.is_written)


@cache
def may_alias(target: Any) -> bool:
    """True if an op's result may share memory with an argument, and for unknown targets.

    ATen declares `reshape`, `contiguous` and `to` as `Tensor(a)` because they sometimes return their input.
    """
    if not isinstance(target, OpOverload):
        return target not in SYMBOLIC
    return any(row.alias_info is not None for row in target._schema.returns) or target in _HIDDEN_ALIASES


_HIDDEN_ALIASES = frozenset(
    {
        # composite ops that return their input (or a view of it) in some cases without declaring it
        aten.dropout.default,
        aten.feature_dropout.default,
        aten.alpha_dropout.default,
        aten.feature_alpha_dropout.default,
        aten.einsum.default,
        aten.pad.default,
        aten.type_as.default,
        aten.sum_to_size.default,
        aten.conj_physical.default,
        aten.cartesian_prod.default,
        *(getattr(getattr(aten, f"atleast_{n}d"), kind) for n in (1, 2, 3) for kind in ("default", "Sequence")),
        aten.broadcast_tensors.default,
        aten.meshgrid.default,
        aten.meshgrid.indexing,
        # undeclared views, so that autograd may take them for new tensors
        aten._unsafe_view.default,
        aten.unsafe_chunk.default,
        aten.unsafe_split.Tensor,
        aten.unsafe_split_with_sizes.default,
    }
)

SYMBOLIC: frozenset[Callable[..., Any]] = frozenset(
    getattr(operator, name)
    for name in (
        "add",
        "sub",
        "mul",
        "floordiv",
        "truediv",
        "mod",
        "neg",
        "pow",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "and_",
        "or_",
    )
) | {torch.sym_max, torch.sym_min, torch.sym_float, torch.sym_int, torch.sym_not, torch.sym_ite}
"""Arithmetic on Python numbers (sizes), never on tensors."""


def is_opaque(node: fx.Node) -> bool:
    """True if a node has no canonical form: an opaque module, a Python function, a foreign op, or an in-place write."""
    if node.op in ("call_module", "call_method"):
        return True
    if node.op != "call_function":
        return False
    target = node.target
    if isinstance(target, OpOverload):
        return target.namespace not in ("aten", "quantized_decomposed", "quantc") or bool(writes(target))
    if isinstance(target, HigherOrderOperator):
        return False
    return target is not operator.getitem and target not in SYMBOLIC


def operands(node: fx.Node) -> Iterator[tuple[str, Any]]:
    """(name, value) of every argument passed to a call, under dialect names; for foreign calls `0`, `1`, … and the
    keywords."""
    target = node.target
    names = [row.name for row in arguments(target)] if isinstance(target, OpOverload) else []
    by_aten = {row.aten_name: row.name for row in arguments(target)} if isinstance(target, OpOverload) else {}
    for index, value in enumerate(node.args):
        yield (names[index] if index < len(names) else str(index)), value
    for key, value in node.kwargs.items():
        yield by_aten.get(key, key), value
