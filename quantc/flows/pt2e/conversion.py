"""Replace observers by quantize and dequantize ops, in one walk, in the form that torch.compile and ExecuTorch read.

Scales are numbers in the call, or for per-channel ones vectors read by `get_attr`. Every reader has a dequantize op of its
own with that reader's metadata, so partitioners can take an op together with its inputs. Run-time scales are computed once
for all readers.
"""

from __future__ import annotations

import copy
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.traceback import NodeSource, NodeSourceAction

from quantc.errors import CalibrationError, DataError
from quantc.flows.foreign_observers import inner, is_observer
from quantc.flows.pt2e.constants import Constants, overload_of
from quantc.flows.pt2e.group_observers import FROM_NODE
from quantc.qdq.registration import decomposed_ops
from quantc.spec.torch_dtypes import PER_CHANNEL, PLAIN, integer_range

STORED = frozenset(
    {torch.uint8, torch.int8, torch.uint16, torch.int16, torch.int32, torch.float8_e5m2, torch.float8_e4m3fn}
)
"""Storage dtypes with static qparams."""
PORTED = ("nn_module_stack", "stack_trace", "quantization_tag")
"""Metadata keys copied to a dequantize op from its reader, and to a quantize op from its producer."""
PASS_NAME = "convert_pt2e"
SIZES = frozenset({torch.ops.aten.sym_size.int, torch.ops.aten.sym_size.default})


def convert_observers(module: fx.GraphModule, *, fold: bool) -> int:
    """Put quantize and dequantize ops in place of the observers of a graph; how many observers there were."""
    conversion = _Conversion(module)
    for node, observer in observer_nodes(module):
        conversion.convert(node, observer)
    if fold:
        conversion.fold()
    return conversion.count


class _Conversion:
    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self.graph = module.graph
        self.constants = Constants(module)
        self.ops = decomposed_ops()
        self.count = 0
        self.numbers: dict[str, int] = {}

    def convert(self, node: fx.Node, observer: Any) -> None:
        self.count += 1
        source = node.args[0]
        if not isinstance(source, fx.Node):
            return
        if callable(getattr(observer, "convert", None)):
            self._show_constant(source, observer).convert(self.module, node)  # it brings its own ops
            return
        dtype: Any = PLAIN.get(observer.dtype, observer.dtype)
        if getattr(observer, "is_dynamic", False):
            self._dynamic(node, source, observer, dtype)
        elif dtype in STORED:
            self._static(node, source, observer, dtype)
        elif dtype is torch.float16:
            self._half(node, source)
        else:
            node.replace_all_uses_with(source)  # it observed, and nothing comes of it
        if not node.users:
            self.graph.erase_node(node)

    # -- scales known beforehand -------------------------------------------------------------------------------

    def _static(self, node: fx.Node, source: fx.Node, observer: Any, dtype: torch.dtype) -> None:
        scale, zero_point = self._qparams(node, source, observer)
        ends = (*_range(observer), dtype)
        with self.graph.inserting_before(node):
            if getattr(observer, "qscheme", None) in PER_CHANNEL:
                vectors = (self._vector("_scale_", scale), self._vector("_zero_point_", zero_point))
                arguments: tuple[Any, ...] = (*vectors, int(observer.ch_axis), *ends)
                quantize, dequantize = self.ops.quantize_per_channel, self.ops.dequantize_per_channel
            else:
                arguments = (float(scale), int(zero_point), *ends)
                quantize, dequantize = self.ops.quantize_per_tensor, self.ops.dequantize_per_tensor
            quantized = self._emit(quantize.default, (source, *arguments), node, source)
            self._insert_dequantize(node, source, dequantize.default, (quantized, *arguments))

    def _qparams(self, node: fx.Node, source: fx.Node, observer: Any) -> tuple[Tensor, Tensor]:
        """The qparams of an observer. Raises if it has seen no data, or data that is not finite."""
        shown = self._show_constant(source, observer)
        where = f"{source.name}, read by {', '.join(user.name for user in node.users)}"
        if _has_nan(inner(shown)):
            raise DataError(
                f"{node.target} has seen NaN, so {source.name} has no scale",
                where=where,
                advice="look for the op that makes it, correct the model or the data, and calibrate again",
            )
        if not _has_range(inner(shown)):
            raise CalibrationError(
                f"{node.target} has seen no data, so {source.name} has no scale",
                where=where,
                advice="run the prepared model on sample data before convert_pt2e: prepared(*inputs)",
            )
        scale, zero_point = (torch.as_tensor(found) for found in shown.calculate_qparams())
        if not bool(torch.isfinite(scale).all()) or bool((scale <= 0).any()):
            raise DataError(
                f"{node.target} gives {source.name} the scale {scale.flatten()[:4].tolist()}",
                where=where,
                advice="scales are positive and finite: look at what the observer has seen",
            )
        return scale, zero_point

    def _show_constant(self, source: fx.Node, observer: Any) -> Any:
        """The observer; if it has seen nothing and its tensor is constant, a copy that has observed it."""
        if _has_range(inner(observer)) or (value := self.constants.value(source)) is None:
            return observer
        shown = copy.deepcopy(observer)
        shown(value)
        return shown

    def _vector(self, prefix: str, value: Tensor) -> fx.Node:
        number = self.numbers.get(prefix, 0)
        while hasattr(self.module, f"{prefix}{number}"):
            number += 1
        self.numbers[prefix] = number + 1
        self.module.register_buffer(f"{prefix}{number}", value.detach().clone())
        return self.graph.create_node("get_attr", f"{prefix}{number}")

    def _insert_dequantize(self, node: fx.Node, source: fx.Node, target: Any, arguments: tuple[Any, ...]) -> None:
        """Insert a dequantize op for every reader; size queries share the first."""
        readers = list(node.users)
        own = [reader for reader in readers if reader.target not in SIZES] or readers[:1]
        first: fx.Node | None = None
        for reader in own:
            made = self._emit(target, arguments, node, reader, _out_dtype(source))
            reader.replace_input_with(node, made)
            first = first or made
        if first is not None and node.users:
            node.replace_all_uses_with(first)

    def _emit(
        self, target: Any, args: tuple[Any, ...], node: fx.Node, like: fx.Node, kwargs: dict[str, Any] | None = None
    ) -> fx.Node:
        """A node that replaces an observer, with some metadata of another."""
        made = self.graph.create_node("call_function", target, args, kwargs or {})
        made.meta = {key: like.meta[key] for key in PORTED if key in like.meta}
        made.meta[FROM_NODE] = [NodeSource(node, PASS_NAME, [NodeSourceAction.CREATE])]
        return made

    # -- scales found as the model runs ------------------------------------------------------------------------

    def _dynamic(self, node: fx.Node, source: fx.Node, observer: Any, dtype: torch.dtype) -> None:
        low, high = _range(observer)
        is_symmetric = getattr(observer, "qscheme", None) is torch.per_tensor_symmetric
        choose = self.ops.choose_qparams_symmetric if is_symmetric else self.ops.choose_qparams
        eps = float(getattr(observer, "eps", torch.finfo(torch.float32).eps))
        like = next((reader for reader in node.users if reader.target not in SIZES), source)
        with self.graph.inserting_before(node):
            chosen = self._emit(choose.tensor, (source, low, high, eps, dtype), node, like)
            found = [self.graph.create_node("call_function", getitem, (chosen, index)) for index in (0, 1)]
            arguments = (*found, low, high, dtype)
            quantized = self._emit(self.ops.quantize_per_tensor.tensor, (source, *arguments), node, like)
            target = self.ops.dequantize_per_tensor.tensor
            made = self._emit(target, (quantized, *arguments), node, like, _out_dtype(source))
        node.replace_all_uses_with(made)

    def _half(self, node: fx.Node, source: fx.Node) -> None:
        convert = self.ops.convert_element_type.no_fuse
        with self.graph.inserting_before(node):
            half = self._emit(convert, (source, torch.float16), node, source)
            made = self._emit(convert, (half, torch.float32), node, source)
        node.replace_all_uses_with(made)

    # -- weights -----------------------------------------------------------------------------------------------

    def fold(self) -> None:
        """Store constants as they are quantized."""
        number = 0
        for node in list(self.graph.nodes):
            if not _is_quantize(node) or (value := self.constants.value(node)) is None:
                continue
            while hasattr(self.module, f"_frozen_param{number}"):
                number += 1
            self.module.register_buffer(f"_frozen_param{number}", value)
            with self.graph.inserting_before(node):
                stored = self.graph.create_node("get_attr", f"_frozen_param{number}")
            stored.meta = _meta_of_constant(node)
            node.replace_all_uses_with(stored)
            self.graph.erase_node(node)
            stored.name = node.name  # the name its quantize op had, as readers of these graphs expect


def _meta_of_constant(node: fx.Node) -> dict[str, Any]:
    """The metadata of a constant that was quantized: what it has of its own, and where it is from."""
    source = node
    while source.op != "get_attr":
        source = source.all_input_nodes[0]
    own = {key: value for key, value in node.meta.items() if key != FROM_NODE}
    return own | ({FROM_NODE: source.meta[FROM_NODE]} if FROM_NODE in source.meta else {})


def _is_quantize(node: fx.Node) -> bool:
    """True for quantize ops: torch's, or those of an observer with its own `convert`."""
    target = overload_of(node.target)
    return target is not None and target._schema.name.partition("::")[2].startswith("quantize_")


def _has_range(observer: Any) -> bool:
    """True if an observer has seen a range; also for one without `min_val` and `max_val`, which can only be asked for qparams."""
    low, high = getattr(observer, "min_val", None), getattr(observer, "max_val", None)
    if not isinstance(low, Tensor) or not isinstance(high, Tensor):
        return True
    return low.numel() > 0 and bool((low <= high).all())


def _has_nan(observer: Any) -> bool:
    ends = (getattr(observer, "min_val", None), getattr(observer, "max_val", None))
    return any(isinstance(end, Tensor) and bool(end.isnan().any()) for end in ends)


def _range(observer: Any) -> tuple[int, int]:
    low, high = observer.quant_min, observer.quant_max
    return (low, high) if low is not None and high is not None else integer_range(observer.dtype, low, high, False)


def _out_dtype(source: fx.Node) -> dict[str, Any]:
    value = source.meta.get("val")
    is_narrow = isinstance(value, Tensor) and value.dtype is not torch.float32
    return {"out_dtype": value.dtype} if is_narrow and value is not None else {}


def observer_nodes(module: fx.GraphModule) -> list[tuple[fx.Node, Any]]:
    """The nodes of a graph that call observers, in its order."""
    calls = [node for node in module.graph.nodes if node.op == "call_module"]
    return [(node, found) for node in calls if is_observer(found := module.get_submodule(str(node.target)))]
