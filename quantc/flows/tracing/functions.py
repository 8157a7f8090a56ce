"""Which torch functions are looked at, and how: by their names, since one op has many spellings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from quantc.flows.tracing.queries import hands_out_memory, is_query


class Kind(Enum):
    """What a torch function is to the quantized model."""

    OTHER = "runs untouched"
    QUERY = "asks about a tensor without looking at its numbers"
    MOVE = "moves elements, bytes as well as floats"
    HOOKED = "may be quantized"
    CALM = "computes on floats what it computes, now or later"
    OPENED = "is written in Python, and is followed into"
    DROPOUT = "gives its argument back, but in training"
    MEMORY = "hands out memory, which can be written to without torch counting it"


PRODUCTS = frozenset(
    [
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        "linear",
        "bilinear",
        "matmul",
        "mm",
        "addmm",
        "bmm",
        "__matmul__",
        "__rmatmul__",
        "embedding",
        "embedding_bag",
        "lstm",
        "gru",
        "rnn_tanh",
        "rnn_relu",
        "lstm_cell",
        "gru_cell",
        "rnn_tanh_cell",
        "rnn_relu_cell",
    ]
)
"""Calls that are quantized for their own sake, if they have a parameter of the model."""

MOVES = frozenset(
    [
        "flatten",
        "view",
        "view_as",
        "reshape",
        "reshape_as",
        "unflatten",
        "squeeze",
        "unsqueeze",
        "transpose",
        "swapaxes",
        "permute",
        "movedim",
        "t",
        "expand",
        "expand_as",
        "repeat",
        "select",
        "narrow",
        "chunk",
        "split",
        "unbind",
        "tile",
        "__getitem__",
        "flip",
        "roll",
        "cat",
        "concat",
        "stack",
        "contiguous",
        "detach",
        "clone",
        "pixel_shuffle",
        "pixel_unshuffle",
        "channel_shuffle",
    ]
)
CALM = frozenset({"adaptive_avg_pool1d", "adaptive_avg_pool2d", "avg_pool1d", "avg_pool2d", "mean"})
"""Calls on floats that often stand between quantized ops, and are put off with them."""
DROPOUT = frozenset({"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"})
IN_MEMORY = frozenset({"view", "view_as", "flatten", "unflatten"})
"""Moves that go by how a tensor lies in memory."""
COPIES = frozenset(
    [
        "cat", "concat", "stack", "clone", "repeat", "tile", "flip", "roll", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle",
    ]
) | CALM  # fmt: skip
"""Calls that never give a view. Others may, as far as how a tensor lies in memory allows it."""
OPENED: tuple[Callable[..., Any], ...] = (torch.nn.functional.multi_head_attention_forward,)


def kind_of(func: Any, hooked: frozenset[str]) -> Kind:
    """What a function is, given the names of those that were seen to be quantizable."""
    if is_query(func):
        return Kind.QUERY
    if func in OPENED:
        return Kind.OPENED
    if hands_out_memory(func):
        return Kind.MEMORY
    name = getattr(func, "__name__", "").partition(".")[0]
    if name == "__get__":
        return Kind.MOVE if getattr(func.__self__, "__name__", "") in ("T", "mT") else Kind.OTHER
    if name in hooked or name in PRODUCTS:
        return Kind.HOOKED
    if name in CALM:
        return Kind.CALM
    if name in DROPOUT:
        return Kind.DROPOUT
    return Kind.MOVE if name in MOVES else Kind.OTHER


def is_product(func: Any, args: Iterable[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a call multiplies with a parameter."""
    if getattr(func, "__name__", "") not in PRODUCTS:
        return False
    return any(isinstance(leaf, nn.Parameter) for leaf in pytree.tree_leaves((tuple(args), kwargs)))


def gives_back(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of dropout does nothing: then torch gives the very tensor that it is given."""
    return (args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", True))) is False


@cache
def opened(func: FunctionType) -> FunctionType:
    """A function of torch without its first lines, which would hand it over whole."""
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    scope = {**func.__globals__, **dict.fromkeys(names, lambda *_: False)}
    made = FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    made.__kwdefaults__ = func.__kwdefaults__
    return made
