"""A `torch.fx` tracer that produces ATen directly.

It traces through the model's own modules and through `torch.nn` and `torch.nn.functional` alike, down to the calls that
reach ATen, and resolves each of these to the overload its arguments select. Only leaf modules stay whole.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import fx, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.proxy import TraceError

from quantc.capture.leaf_modules import LeafSelector
from quantc.capture.rebinding import outs, resize_fault
from quantc.capture.refused_trace import RefusedError
from quantc.capture.source_lines import user_frame
from quantc.capture.symbolic import indexing
from quantc.capture.symbolic.aten_lowering import AtenLowering
from quantc.capture.symbolic.interception import intercept_calls
from quantc.capture.symbolic.meta_values import Shadows, expression, known_truth
from quantc.capture.symbolic.proxies import ProxyValue
from quantc.capture.symbolic.python_spellings import ArgumentKind
from quantc.capture.symbolic.tensor_attributes import tensor_attribute
from quantc.capture.symbolic.traced_state import TensorState
from quantc.ir.dialect import arguments, aten, short_name, writes
from quantc.ir.sites import NodeTable, Origin
from quantc.rewrite.functionalize import reshaping_form
from quantc.rewrite.no_op_calls import IDENTITIES

RETURNS: dict[str, ArgumentKind] = {
    "Tensor": ArgumentKind.TENSOR,
    "int": ArgumentKind.NUMBER,
    "SymInt": ArgumentKind.NUMBER,
    "float": ArgumentKind.NUMBER,
}
CALLS = ("call_function", "call_module", "call_method")
Entry = tuple[Callable[..., Any], list[Any]]
"""A function to call, and the traced values to call it on."""


class AtenTracer(AtenLowering):
    """Traces a module into ATen. `fakes` is the fake tensor mode that computes shapes, or None."""

    proxy_buffer_attributes = True
    traced_func_name = "__call__"

    def __init__(self, leaves: LeafSelector, fakes: FakeTensorMode | None, *, is_training: bool) -> None:
        fx.Tracer.__init__(self, autowrap_modules=(math,))
        self.leaves = leaves
        self.fakes = fakes
        self.shadows = Shadows(fakes)
        self.is_training = is_training
        self.kinds: dict[fx.Node, ArgumentKind] = {}
        self.origins: NodeTable[Origin] = NodeTable()
        self.state = TensorState(fakes)
        self.sizes: dict[str, ProxyValue] = {}
        """The node that computes each symbolic size; two sizes that are the same expression are one node."""
        self.leaf_values: dict[str, list[Any]] = {}
        """The results of each leaf module (as fakes) on the example inputs, call by call."""
        self.is_suspended = False
        """True while modules are run, not traced."""
        self.changes_grad_mode = False
        self._entry: Callable[[], Entry] | None = None

    # -- the trace -------------------------------------------------------------------------------------------

    def trace_into(self, model: nn.Module, entry: Callable[[AtenTracer], Entry]) -> fx.Graph:
        """Trace `model`; `entry` builds the placeholders and the function to call on them."""
        self._entry = lambda: entry(self)
        self.state.learn(model)
        with intercept_calls(self):
            graph = self.trace(model)
        for node in reversed(graph.nodes):
            if node.target in (getattr, aten.sym_size.int) and not node.users:
                self._discard(node, None)  # a shape of which only single sizes were used, or a size not used
        return graph

    def create_args_for_root(self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None) -> Entry:
        if self._entry is None:
            raise RefusedError("this tracer is started with trace_into")
        return self._entry()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return bool(module_qualified_name) and self.leaves.selects(m, module_qualified_name)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.is_suspended:
            return forward(*args, **kwargs)
        try:
            self.path_of_module(m)
        except NameError:
            # made in `forward`, so it has no name; its code is that of the module that made it
            return forward(*args, **kwargs)
        if _is_compiled(m):
            return m._orig_mod(*args, **kwargs)  # type: ignore[operator]
        if isinstance(m, nn.modules.batchnorm._BatchNorm) and not _rank_known(args):
            # only the check of the rank stands in the way, and without shapes there is none to check
            with patch.object(m, "_check_input_dim", lambda _: None):
                return super().call_module(m, forward, args, kwargs)
        return super().call_module(m, forward, args, kwargs)

    def proxy(self, node: fx.Node) -> ProxyValue:
        return ProxyValue(node, self)

    def to_bool(self, obj: fx.Proxy) -> bool:
        return self.decide(obj)

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        fake = obj.node.meta.get("val")
        if isinstance(fake, torch.Tensor) and fake.dim() and type(fake.shape[0]) is int:
            return iter(self.call(aten.unbind.int, (obj,)))
        if isinstance(fake, tuple | list):
            return iter([self.get_item(obj, index) for index in range(len(fake))])
        try:
            return super().iter(obj)
        except TraceError:
            raise RefusedError(f"{obj.node.name} is looped over, but its length is not known while tracing") from None

    def set_grad_enabled(self, function: Any, args: tuple[Any, ...]) -> None:
        """Start or end of a `no_grad` region: part of a training program, of no effect in inference."""
        self.changes_grad_mode = True
        if self.is_training:
            self.create_node("call_function", function, args, {})

    # -- nodes -----------------------------------------------------------------------------------------------

    def create_node(
        self, kind: str, target: Any, args: Any, kwargs: Any, name: Any = None, type_expr: Any = None
    ) -> fx.Node:
        hint = short_name(target) if name is None and isinstance(target, OpOverload) else name
        node = super().create_node(kind, target, args, kwargs, hint, type_expr)
        if kind in CALLS:
            file, line = user_frame(sys._getframe(1))
            path, module_type = self.scope.module_path, self.scope.module_type
            if kind == "call_module":
                path, module_type = str(target), type(self.root.get_submodule(str(target)))
            self.origins[node] = Origin(path or "", _type_name(module_type, self.root), file, line)
        return node

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, fx.Proxy):
            return a.node
        if isinstance(a, torch.Tensor):
            return self.tensor_node(a)
        if isinstance(a, torch.Generator):
            raise RefusedError("a torch.Generator is used, and a graph cannot hold one")
        if isinstance(a, torch.Size):
            return [self.create_arg(item) for item in a]
        return super().create_arg(a)

    def tensor_node(self, tensor: torch.Tensor) -> fx.Node:
        """Node that is the current value of a real tensor."""
        name = self.state.name(tensor)
        if name not in self.state.current:
            node = self.create_node("get_attr", name, (), {})
            self.state.enter(name, node)
            self.kinds[node] = ArgumentKind.TENSOR
            if self.fakes is not None:
                node.meta["val"] = self.state.fake(tensor)
        return self.state.current[name]

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if isinstance(attr_val, torch.Tensor) and self.state.knows(attr_val) and not self.is_suspended:
            node = self.tensor_node(attr_val)
            return parameter_proxy_cache.setdefault(node.name, self.proxy(node))
        return attr_val

    def assign_buffer(self, module: nn.Module, name: str, value: ProxyValue) -> bool:
        """`self.buffer = value` in `forward`: later reads yield the value; it is stored at the end."""
        tensor = module._buffers.get(name)
        if tensor is None or not self.state.knows(tensor):
            return False
        self.tensor_node(tensor)
        self.state.assign(self.state.name(tensor), value.node)
        return True

    def store_assigned(self) -> None:
        """Store assigned values in their buffers; called when `forward` has returned."""
        for name, source in self.state.assigned.items():
            self.create_node("call_function", aten.copy_.default, (source, self.state.current[name]), {})

    def constant_like(self, value: Any, x: ProxyValue) -> torch.Tensor:
        fake = x.fake
        return torch.tensor(value, dtype=fake.dtype if isinstance(fake, torch.Tensor) else None)

    # -- calls -----------------------------------------------------------------------------------------------

    def create_proxy(
        self,
        kind: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str | None = None,
        type_expr: Any = None,
        proxy_factory_fn: Any = None,
    ) -> Any:
        if kind == "call_function":
            return self.lower_function(target, args, kwargs)
        if kind == "call_method":
            return self.lower_method(target, args, kwargs)
        proxy = super().create_proxy(kind, target, args, kwargs, name, type_expr, proxy_factory_fn)
        if kind == "call_module":
            self._note_leaf(str(target), proxy, args, kwargs)
        return proxy

    def _note_leaf(self, target: str, proxy: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.kinds[proxy.node] = ArgumentKind.ANYTHING
        recorded = self.leaf_values.get(target)
        value = recorded.pop(0) if recorded else self._leaf_on_shadows(target, args, kwargs)
        if value is not None:
            proxy.node.meta["val"] = value
            self.kinds[proxy.node] = ArgumentKind.TENSOR if isinstance(value, torch.Tensor) else ArgumentKind.SEQUENCE

    def _leaf_on_shadows(self, target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Result of a leaf for symbolic sizes, if it can be run on fakes."""
        if not self.shadows.has_symbols:
            return None
        self.is_suspended = True
        try:
            return self.shadows.run(self.root.get_submodule(target), args, kwargs)
        finally:
            self.is_suspended = False

    def call(self, target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        if target is aten._pack_padded_sequence.default:
            raise RefusedError("packed sequences have sizes that depend on the data")
        if (view := reshaping_form(target)) is not None:
            # `x.unsqueeze_(0)` changes the shape of the object x, and keeps its memory
            viewed = self.call(view, args, kwargs)
            if isinstance(args[0], ProxyValue):
                args[0].node = viewed.node
            return viewed
        node = self.create_node("call_function", target, self.create_arg(args), self.create_arg(kwargs or {}))
        before = [_size(out) for out in outs(node)]
        value = self.shadows.compute(node)
        for size, out in zip(before, outs(node), strict=True):
            if size is not None and 0 not in size and size != _size(out):
                raise RefusedError(resize_fault(node, size))
        if isinstance(value, bool):
            return self._discard(node, value)
        if target in IDENTITIES and isinstance(args[0], ProxyValue) and value is not None and value is args[0].fake:
            # `contiguous` and `to` give back their argument if they can: later writes must reach both names
            return self._discard(node, args[0])
        if value is not None:
            node.meta["val"] = value
        return self._result(node, target, args, kwargs, value)

    def _result(
        self, node: fx.Node, target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any] | None, value: Any
    ) -> Any:
        returns = target._schema.returns
        if len(returns) == 1 and str(returns[0].type) in RETURNS:
            self.kinds[node] = RETURNS[str(returns[0].type)]
            if self.kinds[node] is ArgumentKind.NUMBER:
                return self._once(node, value)
            return self._rebind_written(node, _written_argument(target, args, kwargs or {}))
        if isinstance(value, list | tuple) or len(returns) > 1:
            count = len(value) if value is not None else len(returns)
            items = tuple(self._item(node, index) for index in range(count))
            named = getattr(torch.return_types, target._schema.name.removeprefix("aten::"), None)
            return named(items) if named is not None and named.n_sequence_fields == count else items
        self.kinds[node] = ArgumentKind.SEQUENCE
        return self.proxy(node)

    def _discard(self, node: fx.Node, result: Any) -> Any:
        self.graph.erase_node(node)
        self.origins.drop(node)
        return result

    def _rebind_written(self, node: fx.Node, written: Any) -> Any:
        """An op that writes in place returns the tensor it was given: from here on that tensor is the new node."""
        if isinstance(written, ProxyValue):
            self.state.moved(written.node, node)
            written.node = node
            return written
        if isinstance(written, torch.Tensor):
            self.state.moved(self.tensor_node(written), node)
        return self.proxy(node)

    def _item(self, node: fx.Node, index: int) -> ProxyValue:
        item = self.create_node("call_function", operator.getitem, (node, index), {})
        self.kinds[item] = ArgumentKind.TENSOR
        value = node.meta.get("val")
        if value is not None:
            item.meta["val"] = value[index]
        return self.proxy(item)

    def record(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kind: ArgumentKind) -> Any:
        node = self.create_node(op, target, self.create_arg(args), self.create_arg(kwargs))
        value = self.shadows.compute(node)
        if isinstance(value, torch.SymBool):
            value = known_truth(value)
        if type(value) in (int, float, bool):
            return self._discard(node, value)
        self.kinds[node] = ArgumentKind.TENSOR if isinstance(value, torch.Tensor) else kind
        if value is not None:
            node.meta["val"] = value
        return self._once(node, value)

    def size(self, target: OpOverload, args: tuple[Any, ...], size: Any) -> Any:
        """A symbolic size of a tensor: computed once, at its first use."""
        known = self.sizes.get(expression(size))
        if known is not None:
            return known
        node = self.create_node("call_function", target, self.create_arg(args), {})
        node.meta["val"] = size
        self.kinds[node] = ArgumentKind.NUMBER
        return self._once(node, size)

    def _once(self, node: fx.Node, value: Any) -> ProxyValue:
        """The value of a node, or an earlier one that is the same symbolic number."""
        text = expression(value)
        if text in self.sizes:
            self._discard(node, None)
            return self.sizes[text]
        found = self.proxy(node)
        if text:
            self.sizes[text] = found
        return found

    # -- what values answer ----------------------------------------------------------------------------------

    def tensor_attribute(self, x: Any, name: str) -> Any:
        return tensor_attribute(self, x, name) if isinstance(x, ProxyValue) else getattr(x, name)

    def get_item(self, x: Any, index: Any) -> Any:
        kind = self.kind_of(x)
        if kind is ArgumentKind.TENSOR:
            return indexing.get_item(self, x, index)
        if kind is ArgumentKind.SHAPE and isinstance(index, int) and (owner := self.shape_owner(x)) is not None:
            return self.call(aten.sym_size.int, (owner, index))
        if kind is ArgumentKind.SHAPE:
            return self.plain(operator.getitem, (x, index), {})
        node = self.create_node("call_function", operator.getitem, (x.node, self.create_arg(index)), {})
        value = x.node.meta.get("val")
        if isinstance(value, tuple | list | dict) and value[index] is not None:
            node.meta["val"] = value[index]
        self.kinds[node] = _kind_of_item(kind, node.meta.get("val"))
        return self.proxy(node)

    def shape_owner(self, x: Any) -> ProxyValue | None:
        node = x.node if isinstance(x, ProxyValue) else None
        is_shape = node is not None and node.target is getattr and node.args[1] == "shape"
        return self.proxy(node.args[0]) if is_shape else None  # type: ignore[union-attr,arg-type]

    def set_item(self, x: ProxyValue, index: Any, value: Any) -> None:
        if x.kind is not ArgumentKind.TENSOR:
            raise RefusedError(f"an item of {x.node.name} is assigned, but it is not known to be a tensor")
        indexing.set_item(self, x, index, value)

    def decide(self, x: fx.Proxy) -> bool:
        """Truth of a value, where shapes alone decide it."""
        fake = x.node.meta.get("val")
        if isinstance(fake, torch.SymBool):
            raise RefusedError(f"a branch depends on a dynamic size ({fake})")
        raise RefusedError(f"a branch depends on the value of {x.node.name}")


def _kind_of_item(kind: ArgumentKind | None, value: Any) -> ArgumentKind:
    if isinstance(value, torch.Tensor):
        return ArgumentKind.TENSOR
    if isinstance(value, int | float):
        return ArgumentKind.NUMBER
    if isinstance(value, list | tuple):
        return ArgumentKind.SEQUENCE
    return ArgumentKind.TENSOR if kind is ArgumentKind.SEQUENCE and value is None else ArgumentKind.ANYTHING


def _size(node: fx.Node) -> tuple[Any, ...] | None:
    fake = node.meta.get("val")
    return tuple(fake.shape) if isinstance(fake, torch.Tensor) else None


def _rank_known(args: tuple[Any, ...]) -> bool:
    return not args or not isinstance(args[0], ProxyValue) or args[0].fake is not None


def _written_argument(target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Argument that an op writes to: its first, or `out`."""
    places = writes(target)
    if not places:
        return None
    row = arguments(target)[places[0]]
    return kwargs.get(row.aten_name, args[places[0]] if places[0] < len(args) else None)


def _type_name(kind: Any, root: nn.Module) -> str:
    found = kind if isinstance(kind, type) else type(root)
    return f"{found.__module__}.{found.__qualname__}"


def _is_compiled(module: nn.Module) -> bool:
    """True if torch.compile made a module. If nothing is compiled, `torch._dynamo` is not imported."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)
