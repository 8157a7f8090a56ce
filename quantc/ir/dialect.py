"""The canonical dialect: the ATen overload of each op, and the names of its operands.

One table. Patterns, dumps, verification and the passes all name ops and operands through it, so `conv2d`'s weight is
`w` everywhere. ATen ops outside the table are still part of the dialect, under their full name (`aten.cumsum.default`)
and with ATen's argument names; they simply have no short name.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from quantc.ir import curves
from quantc.ir.curves import Curve, MakeCurve, always
from quantc.ir.op_row import Family, Op, Trait

aten = torch.ops.aten


X, X_AND_Y, X_OR_Y = (("x",),), (("x", "y"),), (("x",), ("y",))
COMMUTES, KEEPS, EACH, MODAL = Trait.COMMUTES, Trait.PRESERVES_VALUES, Trait.ELEMENTWISE, Trait.MODAL
XW, XY = ("x", "w"), ("x", "y")
RANKS = (1, 2, 3)
LAST_AXIS = {"dim": (-1,)}


def _op(name: str, target: OpOverload, operands: str, family: Family, *traits: Trait, **facts: Any) -> Op:
    return Op(name, target, tuple(operands.split()), family, frozenset(traits), **facts)


def _activation(name: str, curve: MakeCurve | Curve, operands: str = "x", **facts: Any) -> Op:
    make = always(curve) if isinstance(curve, Curve) else curve
    return _op(name, getattr(aten, name).default, operands, Family.ACTIVATION, EACH, curve=make, **facts)


OPS: tuple[Op, ...] = (
    # matmul-like
    *(_op(f"conv{n}d", getattr(aten, f"conv{n}d").default, "x w b", Family.CONV, factors=XW, spatial=n) for n in RANKS),
    *(
        _op(f"conv_transpose{n}d", target, "x w b", Family.CONV_TRANSPOSE, factors=XW, spatial=n)
        for n, target in enumerate(
            (aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input), start=1
        )
    ),
    _op("linear", aten.linear.default, "x w b", Family.MATMUL, factors=XW),
    _op("bilinear", aten.bilinear.default, "x y w b", Family.CONTRACTION),
    _op("matmul", aten.matmul.default, "x y", Family.MATMUL, factors=XY, scales=X_OR_Y),
    _op("addmm", aten.addmm.default, "b x y", Family.MATMUL, factors=XY),
    _op("baddbmm", aten.baddbmm.default, "b x y", Family.MATMUL, factors=XY),
    _op("einsum", aten.einsum.default, "equation operands", Family.CONTRACTION),
    _op("sdpa", aten.scaled_dot_product_attention.default, "q k v mask", Family.CONTRACTION, MODAL, scales=(("v",),)),
    _op("embedding", aten.embedding.default, "w indices", Family.LOOKUP),
    _op("embedding_bag", aten.embedding_bag.padding_idx, "w indices offsets", Family.LOOKUP),
    *(
        _op(name, getattr(aten, name).input, "x hx params", Family.RECURRENT, MODAL)
        for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    ),
    *(
        _op(f"{name}_cell", getattr(aten, f"{name}_cell").default, "x hx w_ih w_hh b_ih b_hh", Family.RECURRENT_CELL)
        for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    ),
    # binary arithmetic
    _op("add", aten.add.Tensor, "x y", Family.ARITHMETIC, COMMUTES, EACH, scales=X_AND_Y),
    _op("sub", aten.sub.Tensor, "x y", Family.ARITHMETIC, EACH, aliases=("subtract",), scales=X_AND_Y),
    _op("rsub", aten.rsub.Scalar, "x y", Family.ARITHMETIC, EACH, examples={"y": (1.0,)}),
    _op("mul", aten.mul.Tensor, "x y", Family.ARITHMETIC, COMMUTES, EACH, aliases=("multiply",), scales=X_OR_Y),
    _op("div", aten.div.Tensor, "x y", Family.ARITHMETIC, EACH, aliases=("divide", "true_divide"), scales=X),
    _op("pow", aten.pow.Tensor_Scalar, "x exponent", Family.ARITHMETIC, EACH),
    _op("maximum", aten.maximum.default, "x y", Family.ARITHMETIC, COMMUTES, EACH, scales=X_AND_Y),
    _op("minimum", aten.minimum.default, "x y", Family.ARITHMETIC, COMMUTES, EACH, scales=X_AND_Y),
    _op("where", aten.where.self, "condition x y", Family.ARITHMETIC, EACH, scales=X_AND_Y),
    _op("masked_fill", aten.masked_fill.Scalar, "x mask value", Family.ARITHMETIC, EACH, scales=X),
    # activations
    _activation("relu", curves.RELU),
    _activation("clamp", curves.clamp, "x min max", aliases=("clip",), examples={"min": (-1.0,), "max": (1.0,)}),
    _activation("hardswish", curves.HARDSWISH),
    _activation("hardsigmoid", curves.HARDSIGMOID, range=(0.0, 1.0)),
    _activation("silu", curves.SILU),
    _activation("mish", curves.MISH),
    _activation("gelu", curves.gelu),
    _activation("leaky_relu", curves.leaky_relu),
    _activation("elu", curves.elu),
    _activation("selu", curves.SELU),
    _activation("celu", curves.celu),
    _op("prelu", aten.prelu.default, "x w", Family.OTHER, scales=X),
    _activation("sigmoid", curves.SIGMOID, range=(0.0, 1.0), aliases=("special_expit",)),
    _activation("tanh", curves.TANH, range=(-1.0, 1.0)),
    _activation("softplus", curves.softplus),
    _activation("softshrink", curves.softshrink),
    _op("glu", aten.glu.default, "x", Family.OTHER, examples=LAST_AXIS),
    _op("softmax", aten.softmax.int, "x dim", Family.SOFTMAX, range=(0.0, 1.0), examples=LAST_AXIS),
    _op("log_softmax", aten.log_softmax.int, "x dim", Family.SOFTMAX, examples=LAST_AXIS),
    _op("neg", aten.neg.default, "x", Family.MATH, EACH, aliases=("negative",), scales=X),
    _op("abs", aten.abs.default, "x", Family.MATH, EACH, aliases=("absolute",), scales=X),
    *(
        _op(name, getattr(aten, name).default, "x", Family.MATH, EACH)
        for name in ("exp", "log", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "erf")
    ),
    # normalization and dropout
    _op("batch_norm", aten.batch_norm.default, "x w b mean var", Family.NORM, MODAL),
    _op("instance_norm", aten.instance_norm.default, "x w b mean var", Family.NORM, MODAL),
    _op("layer_norm", aten.layer_norm.default, "x normalized_shape w b", Family.NORM),
    _op("group_norm", aten.group_norm.default, "x num_groups w b", Family.NORM),
    _op("rms_norm", aten.rms_norm.default, "x normalized_shape w", Family.NORM),
    *(
        _op(
            name,
            getattr(aten, name).default,
            "x",
            Family.DROPOUT,
            MODAL,
            examples={"p": (0.5,), "train": (False,)},
            scales=X,
        )
        for name in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
    ),
    # pooling, reduction
    *(
        _op(f"max_pool{n}d", getattr(aten, f"max_pool{n}d").default, "x", Family.MAX_POOL, KEEPS, spatial=n)
        for n in RANKS
    ),
    _op("max_pool2d_with_indices", aten.max_pool2d_with_indices.default, "x", Family.OTHER, spatial=2),
    *(
        _op(f"avg_pool{n}d", getattr(aten, f"avg_pool{n}d").default, "x", Family.AVERAGE_POOL, spatial=n, scales=X)
        for n in RANKS
    ),
    *(
        _op(
            f"adaptive_avg_pool{n}d",
            getattr(aten, f"adaptive_avg_pool{n}d").default,
            "x",
            Family.ADAPTIVE_POOL,
            spatial=n,
            scales=X,
            aliases=(f"_adaptive_avg_pool{n}d",) if n > 1 else (),
        )
        for n in RANKS
    ),
    _op("mean", aten.mean.dim, "x dim", Family.REDUCTION, scales=X),
    _op("sum", aten.sum.dim_IntList, "x dim", Family.REDUCTION, scales=X),
    _op("amax", aten.amax.default, "x dim", Family.EXTREME, scales=X),
    _op("amin", aten.amin.default, "x dim", Family.EXTREME, scales=X),
    _op("max", aten.max.dim, "x dim", Family.OTHER),
    _op("min", aten.min.dim, "x dim", Family.OTHER),
    _op("topk", aten.topk.default, "x", Family.OTHER),
    # joining, splitting
    _op("cat", aten.cat.default, "xs", Family.JOIN, KEEPS, aliases=("concat", "concatenate")),
    _op("stack", aten.stack.default, "xs", Family.JOIN, KEEPS),
    _op("split", aten.split.Tensor, "x", Family.SPLIT, KEEPS, aliases=("unsafe_split",)),
    _op(
        "split_sizes",
        aten.split_with_sizes.default,
        "x",
        Family.SPLIT,
        KEEPS,
        aliases=("unsafe_split_with_sizes",),
    ),
    _op("chunk", aten.chunk.default, "x", Family.SPLIT, KEEPS, aliases=("unsafe_chunk",)),
    _op("unbind", aten.unbind.int, "x", Family.SPLIT, KEEPS),
    # data movement
    _op(
        "reshape",
        aten.reshape.default,
        "x shape",
        Family.VIEW,
        KEEPS,
        aliases=("view", "_unsafe_view", "_reshape_alias"),
    ),
    _op(
        "flatten",
        aten.flatten.using_ints,
        "x",
        Family.VIEW,
        KEEPS,
        examples={"start_dim": (1,), "end_dim": (-1,)},
    ),
    _op("unflatten", aten.unflatten.int, "x", Family.VIEW, KEEPS),
    _op("squeeze", aten.squeeze.dim, "x", Family.VIEW, KEEPS),
    _op("unsqueeze", aten.unsqueeze.default, "x", Family.VIEW, KEEPS),
    _op("transpose", aten.transpose.int, "x", Family.PERMUTE, KEEPS, aliases=("swapaxes", "swapdims")),
    _op("permute", aten.permute.default, "x dims", Family.PERMUTE, KEEPS),
    _op("expand", aten.expand.default, "x size", Family.EXPAND, KEEPS),
    _op("repeat", aten.repeat.default, "x", Family.EXPAND, KEEPS),
    _op("slice", aten.slice.Tensor, "x", Family.SLICE, KEEPS),
    _op("select", aten.select.int, "x", Family.SLICE, KEEPS),
    _op("narrow", aten.narrow.default, "x", Family.SLICE, KEEPS),
    _op("index", aten.index.Tensor, "x indices", Family.GATHER, KEEPS),
    _op("index_select", aten.index_select.default, "x dim index", Family.GATHER, KEEPS),
    _op("gather", aten.gather.default, "x dim index", Family.GATHER, KEEPS),
    _op("flip", aten.flip.default, "x", Family.FLIP, KEEPS, examples={"dims": ([-1],)}),
    _op("roll", aten.roll.default, "x", Family.FLIP, KEEPS, examples={"shifts": ([1],), "dims": ([-1],)}),
    _op("pad", aten.pad.default, "x", Family.PAD, KEEPS, examples={"pad": ([1, 1],)}),
    *(
        _op(name, getattr(aten, name).default, "x", Family.SHUFFLE, KEEPS)
        for name in ("pixel_shuffle", "pixel_unshuffle", "channel_shuffle")
    ),
    *(
        _op(f"upsample_nearest{n}d", getattr(aten, f"upsample_nearest{n}d").vec, "x", Family.RESIZE, KEEPS, spatial=n)
        for n in RANKS
    ),
    _op("upsample_linear1d", aten.upsample_linear1d.vec, "x", Family.INTERPOLATE, spatial=1, scales=X),
    _op("upsample_bilinear2d", aten.upsample_bilinear2d.vec, "x", Family.INTERPOLATE, spatial=2, scales=X),
    _op("contiguous", aten.contiguous.default, "x", Family.COPY, KEEPS),
    _op("clone", aten.clone.default, "x", Family.COPY, KEEPS),
    _op("detach", aten.detach.default, "x", Family.COPY, KEEPS),
    _op("cast", aten.to.dtype, "x dtype", Family.OTHER),
    _op("sym_size", aten.sym_size.int, "x dim", Family.OTHER),
)

BY_NAME: dict[str, Op] = {op.name: op for op in OPS}
BY_TARGET: dict[OpOverload, Op] = {op.target: op for op in OPS}


OVERLOADS: Mapping[Family, tuple[str, ...]] = {
    Family.VIEW: ("aten.squeeze.default", "aten.squeeze.dims"),
    Family.EXPAND: ("aten.repeat_interleave.self_int",),
    Family.INTERPOLATE: ("aten.upsample_trilinear3d.vec",),
}
"""Overloads without a short name, by family."""


def ops_in(*families: Family, but: Collection[str] = (), overloads: bool = False) -> tuple[str, ...]:
    """The ops of some families, by name, family by family; with `overloads`, those without a short name too."""
    found: list[str] = []
    for family in families:
        found += (op.name for op in OPS if op.family is family and op.name not in but)
        found += OVERLOADS.get(family, ()) if overloads else ()
    return tuple(found)


FACTORS: Mapping[str, tuple[str, str]] = {op.name: op.factors for op in OPS if op.factors}
"""Ops that multiply two operands and accumulate, with the names of the two."""
WEIGHTED = tuple(name for name, factors in FACTORS.items() if factors == XW)
"""Products of an input and a weight: convolutions, transposed or not, and linear."""
ADDING = frozenset(name for name in FACTORS if BY_NAME[name].operands[0] == "b")
"""Products that add their first operand."""
DROPOUTS = ops_in(Family.DROPOUT)
"""The ops that drop elements in training."""
RANGES: Mapping[str, tuple[float, float]] = {op.name: op.range for op in OPS if op.range}
"""Ops whose results have a range whatever they read."""
CURVES = tuple(op.name for op in OPS if op.curve)
"""Functions of one number with a float64 reference."""


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


def in_place(op: Op) -> OpOverload | None:
    """The overload that writes an op's result over its first operand: `relu_` for `relu`."""
    packet = getattr(aten, f"{op.target._schema.name.removeprefix('aten::')}_", None)
    return getattr(packet, op.target._overloadname, None)


def row_of(node: Any) -> Op | None:
    """The row of a call of a canonical op."""
    if not isinstance(node, fx.Node) or not isinstance(node.target, OpOverload):
        return None
    return BY_TARGET.get(node.target)


def traits_of(node: fx.Node) -> frozenset[Trait]:
    row = row_of(node)
    return row.traits if row is not None else frozenset()


def is_op(node: Any, *names: str) -> bool:
    """True if `node` is a call of one of the named canonical ops."""
    row = row_of(node)
    return row is not None and row.name in names


def curve_of(node: fx.Node) -> Curve | None:
    """The float64 reference of a function of one number; None for other ops, and for options it does not cover."""
    row = row_of(node)
    if row is None or row.curve is None:
        return None
    return row.curve(**{option.name: argument(node, option.name) for option in arguments(row.target)[1:]})


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
        *(BY_NAME[name].target for name in DROPOUTS),
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
