"""A `torch.fx` tracer whose graph is ATen from the first node.

It follows the model through its own modules and through `torch.nn` and `torch.nn.functional` alike, down to the
calls that reach ATen, and spells each of these as the overload its arguments select. Only modules named as leaves
stay whole.
"""

from __future__ import annotations

import inspect
import math
import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import fx, nn
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.proxy import Attribute, TraceError
from torch.overrides import TorchFunctionMode, resolve_name

from quantc.capture import indexing
from quantc.capture.attributes import tensor_attribute
from quantc.capture.proxies import RefusedError, Value
from quantc.capture.sources import user_frame
from quantc.capture.spellings import CASTS, DUNDERS, FACTORIES, OPERATORS, SPREAD, Kind, packet, resolve
from quantc.dialect import aten, short_name
from quantc.functional import reshaping_form
from quantc.identities import IDENTITIES
from quantc.sites import NodeTable, Origin

RETURNS: dict[str, Kind] = {"Tensor": Kind.TENSOR, "int": Kind.NUMBER, "SymInt": Kind.NUMBER, "float": Kind.NUMBER}
PYTHON_METHODS = frozenset({"norm", "split"})
"""Methods of Tensor whose Python body picks the ATen op."""
UNARY_PYTHON = (math.floor, math.ceil, math.sqrt, math.prod, int, float, bool, round)


class AtenTracer(fx.Tracer):
    """Traces a module into ATen. `fakes` is the mode that computes shapes, or None when there are none."""

    proxy_buffer_attributes = True

    def __init__(self, leaves: LeafSelector, fakes: FakeTensorMode | None, is_training: bool) -> None:
        super().__init__(autowrap_modules=(math,))
        self.leaves = leaves
        self.fakes = fakes
        self.is_training = is_training
        self.kinds: dict[fx.Node, Kind] = {}
        self.origins: NodeTable[Origin] = NodeTable()
        self.leaf_values: dict[str, list[Any]] = {}
        """What each leaf module returned when the example inputs were run, call by call."""
        self.constants: dict[str, torch.Tensor] = {}
        """Tensors made in `forward`, and tensors that are plain attributes of modules."""
        self._names: dict[int, str] = {}
        self._attributes: dict[str, fx.Node] = {}
        """The node that is each parameter's or buffer's value at this point of the trace."""
        self._attribute_of: dict[fx.Node, str] = {}
        self._assigned: dict[str, fx.Node] = {}
        self.changes_grad_mode = False
        self._fake_constants: dict[int, Any] = {}
        self._make_arguments: Callable[[], tuple[Callable[..., Any], list[Any]]] | None = None

    # -- the trace -------------------------------------------------------------------------------------------

    def trace_into(
        self, model: nn.Module, make: Callable[[AtenTracer], tuple[Callable[..., Any], list[Any]]]
    ) -> fx.Graph:
        """Trace `model`; `make` builds the placeholders and the function to call on them."""
        self._make_arguments = lambda: make(self)
        for name, tensor in [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]:
            self._names.setdefault(id(tensor), name)
        for path, module in model.named_modules():
            for name, tensor in vars(module).items():
                if isinstance(tensor, torch.Tensor) and id(tensor) not in self._names:
                    self._names[id(tensor)] = f"{path}.{name}" if path else name
                    self.constants[self._names[id(tensor)]] = tensor
        with ExitStack() as stack:
            stack.enter_context(_python_functions_opened())
            stack.enter_context(_Interceptor(self))
            stack.enter_context(_buffers_watched(self))
            return self.trace(model)

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        if self._make_arguments is None:
            raise RuntimeError("trace_into is the way in")
        return self._make_arguments()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return self.leaves.selects(m, module_qualified_name)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        try:
            self.path_of_module(m)
        except NameError:
            # made in `forward`, so it has no name; its code is that of the module that made it
            return forward(*args, **kwargs)
        if isinstance(m, nn.modules.batchnorm._BatchNorm) and not _rank_known(args):
            # only the check of the rank stands in the way, and without shapes there is none to check
            with patch.object(m, "_check_input_dim", lambda _: None):
                return super().call_module(m, forward, args, kwargs)
        return super().call_module(m, forward, args, kwargs)

    def proxy(self, node: fx.Node) -> Value:
        return Value(node, self)

    def to_bool(self, obj: fx.Proxy) -> bool:
        return self.decide(obj)

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        fake = obj.node.meta.get("val")
        if isinstance(fake, torch.Tensor) and fake.dim() and isinstance(fake.shape[0], int):
            return iter(self.call(aten.unbind.int, (obj,)))
        if isinstance(fake, tuple | list):
            return iter([self.get_item(obj, index) for index in range(len(fake))])
        try:
            return super().iter(obj)
        except TraceError:
            raise self.refuse(f"{obj.node.name} is looped over, but its length is not known while tracing") from None

    def refuse(self, reason: str) -> RefusedError:
        return RefusedError(reason)

    # -- nodes -----------------------------------------------------------------------------------------------

    def create_node(
        self, kind: str, target: Any, args: Any, kwargs: Any, name: Any = None, type_expr: Any = None
    ) -> fx.Node:
        if name is None and isinstance(target, OpOverload):
            name = short_name(target)
        node = super().create_node(kind, target, args, kwargs, name, type_expr)
        if kind in ("call_function", "call_module", "call_method"):
            file, line = user_frame(sys._getframe(1))
            scope = self.scope
            module_type = scope.module_type
            path = scope.module_path
            if kind == "call_module":
                path, module_type = target, type(self.root.get_submodule(target))
            self.origins[node] = Origin(path or "", _type_name(module_type, self.root), file, line)
        return node

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, torch.Tensor):
            return self.tensor_node(a)
        if isinstance(a, Attribute):
            return a.node
        if isinstance(a, torch.Size):
            return [self.create_arg(item) for item in a]
        return super().create_arg(a)

    def tensor_node(self, tensor: torch.Tensor) -> fx.Node:
        """The get_attr node of a real tensor met in the trace; unregistered ones become constants."""
        name = self._names.get(id(tensor))
        if name is None:
            name = f"_tensor_constant{len(self.constants)}"
            self._names[id(tensor)] = name
            self.constants[name] = tensor  # also keeps the tensor, and so its id, alive
        return self.attribute_node(name, tensor)

    def attribute_node(self, name: str, tensor: torch.Tensor) -> fx.Node:
        node = self._attributes.get(name)
        if node is None:
            node = self.create_node("get_attr", name, (), {})
            self._attributes[name] = node
            self._attribute_of[node] = name
            self.kinds[node] = Kind.TENSOR
            if self.fakes is not None:
                node.meta["val"] = self.fake_constant(tensor)
        return node

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if isinstance(attr_val, torch.Tensor) and id(attr_val) in self._names:
            # keyed by tensor, so a name that a write in place moved on is found again under its newest node
            node = self.tensor_node(attr_val)
            return parameter_proxy_cache.setdefault(node.name, self.proxy(node))
        return attr_val

    def fake_constant(self, tensor: torch.Tensor) -> Any:
        if self.fakes is None:
            return None
        if id(tensor) not in self._fake_constants:
            with torch._C.DisableTorchFunction():
                self._fake_constants[id(tensor)] = self.fakes.from_tensor(tensor.detach(), static_shapes=True)
        return self._fake_constants[id(tensor)]

    def constant_like(self, value: Any, x: Value) -> torch.Tensor:
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
            self._note_leaf(target, proxy)
        return proxy

    def _note_leaf(self, target: str, proxy: Any) -> None:
        self.kinds[proxy.node] = Kind.ANYTHING
        recorded = self.leaf_values.get(target)
        if recorded and self.fakes is not None:
            value = torch.utils._pytree.tree_map_only(torch.Tensor, self.fakes.from_tensor, recorded.pop(0))
            proxy.node.meta["val"] = value
            self.kinds[proxy.node] = Kind.TENSOR if isinstance(value, torch.Tensor) else Kind.SEQUENCE

    def kind_of(self, value: Any) -> Kind | None:
        if isinstance(value, Value):
            return value.kind
        return Kind.ANYTHING if isinstance(value, fx.Proxy) else None

    def has_tensor(self, values: Iterable[Any]) -> bool:
        return any(isinstance(v, torch.Tensor) or self.kind_of(v) in (Kind.TENSOR, Kind.ANYTHING) for v in values)

    def lower_function(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a Python function, as ATen."""
        if isinstance(function, OpOverload):
            return self.call(function, args, kwargs)
        if isinstance(function, OpOverloadPacket):
            return self._resolved(function, function.__name__, args, kwargs)
        if function is getattr:
            found = getattr(args[0], args[1])
            return self.opaque("call_function", getattr, args, {}) if isinstance(found, Attribute) else found
        if function is operator.getitem:
            return self.get_item(args[0], args[1])
        if function in OPERATORS:
            return self.lower_operator(function, args)
        if function in UNARY_PYTHON or getattr(function, "__module__", "") == "math":
            return self.plain(function, args, kwargs)
        name = getattr(function, "__name__", "")
        if name in DUNDERS and name not in ("__and__", "__or__", "__xor__"):
            return DUNDERS[name](*args, **kwargs)
        if name == "__get__":
            return getattr(args[0], resolve_name(function).split(".")[-2])
        op = packet(name) if _is_torch_builtin(function) else None
        if op is None:
            return self.opaque("call_function", function, args, kwargs)
        return self._resolved(op, name, args, kwargs, function)

    def lower_method(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A method call `args[0].name(...)`, as ATen."""
        x, rest = args[0], args[1:]
        if self.kind_of(x) not in (Kind.TENSOR, Kind.ANYTHING) and not isinstance(x, torch.Tensor):
            return self.opaque("call_method", name, args, kwargs)
        if name in ("size", "dim", "numel", "ndimension", "nelement", "item", "tolist"):
            return self._query(x, name, rest, kwargs)
        if name in CASTS and not rest:
            return self.call(aten.to.dtype, (x, CASTS[name]))
        if name == "cpu":
            return x
        if name == "to":
            return self._converted(x, rest, kwargs)
        if name in ("__getitem__", "__setitem__"):
            return getattr(type(x), name)(x, *rest)
        if name in PYTHON_METHODS:
            return getattr(torch.Tensor, name)(x, *rest, **kwargs)
        if (
            name in SPREAD
            and rest
            and not isinstance(rest[0], list | tuple)
            and self.kind_of(rest[0]) is not Kind.SHAPE
        ):
            rest = (list(rest),)
        op = packet(name)
        if op is None:
            return self.opaque("call_method", name, args, kwargs)
        return self._resolved(op, name, (x, *rest), kwargs)

    def _converted(self, x: Any, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`x.to(...)` with any mix of dtype, device and other tensor."""
        wanted = dict(kwargs)
        for value in rest:
            if isinstance(value, torch.dtype):
                wanted["dtype"] = value
            elif isinstance(value, str | torch.device | int):
                wanted["device"] = value
            elif isinstance(value, Value) and isinstance(value.fake, torch.Tensor):
                wanted |= {"dtype": value.fake.dtype, "device": value.fake.device}
            else:
                return self._resolved(aten.to, "to", (x, *rest), kwargs)
        device, dtype = wanted.pop("device", None), wanted.pop("dtype", None)
        wanted = {name: value for name, value in wanted.items() if value not in (None, False, torch.preserve_format)}
        if wanted or (device is not None and torch.device(device).type != "cpu"):
            return self._resolved(aten.to, "to", (x, *rest), kwargs)
        return x if dtype is None else self.call(aten.to.dtype, (x, dtype))

    def _query(self, x: Any, name: str, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "size":
            shape = x.shape
            dim = rest[0] if rest else kwargs.get("dim")
            return shape if dim is None else shape[dim]
        if name in ("dim", "ndimension"):
            return x.ndim
        if name in ("numel", "nelement"):
            fake = x.fake if isinstance(x, Value) else x
            if isinstance(fake, torch.Tensor) and isinstance(fake.numel(), int):
                return fake.numel()
            return self.call(aten.sym_numel.default, (x,))
        raise self.refuse(f".{name}() turns a tensor into a Python value, which a graph cannot hold")

    def lower_inplace(self, inplace: Any, plain: Any, left: Value, right: Any) -> Any:
        """`x += y`: a write on a tensor; on a number it only gives the name a new value."""
        is_tensor = left.kind in (Kind.TENSOR, Kind.ANYTHING)
        return self.lower_operator(inplace if is_tensor else plain, (left, right))

    def lower_operator(self, function: Any, args: tuple[Any, ...]) -> Any:
        """`a + b` and its like: tensor arithmetic only if an operand is a tensor."""
        if not self.has_tensor(args):
            return self.plain(function, args, {})
        left = args[0]
        if len(args) == 2 and not self.has_tensor((left,)):
            right = args[1]
            if function is operator.sub:
                return self.call(aten.rsub.Scalar, (right, left))
            if function is operator.truediv:
                return self.call(aten.mul.Tensor, (self.call(aten.reciprocal.default, (right,)), left))
            if function in (operator.add, operator.mul):
                args = (right, left)
        name = OPERATORS[function]
        op = packet(name)
        if op is None:
            return self.opaque("call_function", function, args, {})
        return self._resolved(op, name, args, {}, function)

    def _resolved(
        self, op: OpOverloadPacket, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], function: Any = None
    ) -> Any:
        binding = resolve(op, args, kwargs, self.kind_of)
        if binding is not None:
            return self.call(binding.overload, binding.args, binding.kwargs)
        if function is None:
            return self.opaque("call_method", name, args, kwargs)
        return self.opaque("call_function", function, args, kwargs)

    def call(self, target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        """Record a call of an overload and give what it returns: a value, or a tuple of them."""
        if (view := reshaping_form(target)) is not None:
            # `x.unsqueeze_(0)` gives the object x another shape, and leaves its memory as it is
            viewed = self.call(view, args, kwargs)
            if isinstance(args[0], Value):
                args[0].node = viewed.node
            return viewed
        node = self.create_node("call_function", target, self.create_arg(args), self.create_arg(kwargs or {}))
        value = self._compute(node)
        if target in IDENTITIES and isinstance(args[0], Value) and value is not None and value is args[0].fake:
            # `contiguous` and `to` give back their argument if they can: later writes must reach both names
            self._discard(node)
            return args[0]
        if isinstance(value, bool):
            self._discard(node)
            return value
        if value is not None:
            node.meta["val"] = value
        returns = target._schema.returns
        if len(returns) == 1 and str(returns[0].type) in RETURNS:
            self.kinds[node] = RETURNS[str(returns[0].type)]
            return self._written(node, args, target)
        if isinstance(value, list | tuple) or len(returns) > 1:
            count = len(value) if value is not None else len(returns)
            items = tuple(self._item(node, index) for index in range(count))
            named = getattr(torch.return_types, target._schema.name.removeprefix("aten::"), None)
            return named(items) if named is not None and named.n_sequence_fields == count else items
        self.kinds[node] = Kind.SEQUENCE
        return self.proxy(node)

    def _discard(self, node: fx.Node) -> None:
        self.graph.erase_node(node)
        self.origins.drop(node)

    def _written(self, node: fx.Node, args: tuple[Any, ...], target: OpOverload) -> Any:
        """An op that writes in place returns the tensor it was given: from here on that tensor is the new node."""
        written = args[0] if target._schema.is_mutable and args else None
        if isinstance(written, torch.Tensor) and id(written) in self._names:
            self._move_attribute(self._attributes[self._names[id(written)]], node)
        if isinstance(written, Value):
            self._move_attribute(written.node, node)
            written.node = node
            return written
        return self.proxy(node)

    def _move_attribute(self, old: fx.Node, new: fx.Node) -> None:
        """The state that `old` stood for is `new` from here on."""
        name = self._attribute_of.get(old)
        if name is not None:
            self._attributes[name] = new
            self._attribute_of[new] = name

    def assign_buffer(self, module: nn.Module, name: str, value: Value) -> bool:
        """`self.buffer = value` in `forward`: what is read from now on is the value; it is stored at the end."""
        tensor = module._buffers.get(name)
        if tensor is None or id(tensor) not in self._names:
            return False
        target = self._names[id(tensor)]
        if self._attribute_of.get(value.node) == target:
            return True  # `self.buffer += 1` assigns the buffer to itself
        self.tensor_node(tensor)
        source = next(node for node, name in self._attribute_of.items() if name == target and node.op == "get_attr")
        self._assigned.setdefault(target, source)
        self._attributes[target] = value.node
        self._attribute_of[value.node] = target
        return True

    def store_assigned(self) -> None:
        for target, node in self._assigned.items():
            self.create_node("call_function", aten.copy_.default, (node, self._attributes[target]), {})

    def _item(self, node: fx.Node, index: int) -> Value:
        item = self.create_node("call_function", operator.getitem, (node, index), {})
        self.kinds[item] = Kind.TENSOR
        value = node.meta.get("val")
        if value is not None:
            item.meta["val"] = value[index]
        return self.proxy(item)

    def plain(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Arithmetic on Python numbers and shapes; done at once unless a size is dynamic."""
        if not any(isinstance(value, fx.Proxy) for value in args):
            return function(*args, **kwargs)
        node = self.create_node("call_function", function, self.create_arg(args), self.create_arg(kwargs))
        kinds = [self.kind_of(value) for value in args]
        self.kinds[node] = Kind.SHAPE if Kind.SHAPE in kinds else Kind.NUMBER
        value = self._compute(node)
        if isinstance(value, int | float) and not isinstance(value, torch.SymInt):
            self._discard(node)
            return value
        if value is not None:
            node.meta["val"] = value
        return self.proxy(node)

    def opaque(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that has no ATen spelling; it stays as it is, and is reported."""
        if isinstance(target, HigherOrderOperator) or inspect.isclass(target):
            raise self.refuse(
                f"{getattr(target, '__name__', target)} cannot be traced symbolically; use method='export'"
            )
        node = self.create_node(op, target, self.create_arg(args), self.create_arg(kwargs))
        self.kinds[node] = Kind.ANYTHING
        value = self._compute(node)
        if value is not None:
            node.meta["val"] = value
            if isinstance(value, torch.Tensor):
                self.kinds[node] = Kind.TENSOR
        return self.proxy(node)

    def _compute(self, node: fx.Node) -> Any:
        """The fake value of a node; None where an operand's is unknown or the op cannot be run on fakes."""
        if self.fakes is None or any("val" not in operand.meta for operand in node.all_input_nodes):
            return None
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
        try:
            with torch._C.DisableTorchFunction(), self.fakes, torch.no_grad():
                if node.op == "call_method":
                    return getattr(args[0], str(node.target))(*args[1:], **kwargs)
                return node.target(*args, **kwargs)  # type: ignore[operator]
        except (NotImplementedError, torch._subclasses.fake_tensor.UnsupportedOperatorException):
            return None

    # -- what values answer ----------------------------------------------------------------------------------

    def tensor_attribute(self, x: Value, name: str) -> Any:
        return tensor_attribute(self, x, name)

    def get_item(self, x: Any, index: Any) -> Any:
        kind = self.kind_of(x)
        if kind is Kind.TENSOR:
            return indexing.get_item(self, x, index)
        if kind is Kind.SHAPE and isinstance(index, int) and (origin := _shape_owner(x.node)) is not None:
            return self.call(aten.sym_size.int, (self.proxy(origin), index))
        if kind is Kind.SHAPE:
            return self.plain(operator.getitem, (x, index), {})
        node = self.create_node("call_function", operator.getitem, (x.node, self.create_arg(index)), {})
        value = x.node.meta.get("val")
        if isinstance(value, tuple | list):
            node.meta["val"] = value[index]
        is_tensor = kind is Kind.SEQUENCE or isinstance(node.meta.get("val"), torch.Tensor)
        self.kinds[node] = Kind.TENSOR if is_tensor else Kind.ANYTHING
        return self.proxy(node)

    def set_item(self, x: Value, index: Any, value: Any) -> None:
        if x.kind is not Kind.TENSOR:
            raise self.refuse(f"an item of {x.node.name} is assigned, but it is not known to be a tensor")
        indexing.set_item(self, x, index, value)

    def decide(self, x: fx.Proxy) -> bool:
        """The truth of a value, where shapes alone decide it."""
        fake = x.node.meta.get("val")
        if isinstance(fake, torch.SymBool):
            if statically_known_true(fake):
                return True
            if statically_known_true(torch.sym_not(fake)):
                return False
            raise self.refuse(f"a branch depends on a dynamic size ({fake})")
        raise self.refuse(f"a branch depends on the value of {x.node.name}")


class LeafSelector:
    """Which modules stay whole: by qualified name or by class."""

    def __init__(self, names: frozenset[str], classes: tuple[type[nn.Module], ...]) -> None:
        self.names = names
        self.classes = classes

    def selects(self, module: nn.Module, name: str) -> bool:
        return name in self.names or (bool(self.classes) and isinstance(module, self.classes))

    def __bool__(self) -> bool:
        return bool(self.names or self.classes)


class _Interceptor(TorchFunctionMode):
    """Catches torch calls that no traced value takes part in: tensors made in `forward`, and arithmetic on them."""

    def __init__(self, tracer: AtenTracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        flat = torch.utils._pytree.tree_leaves((args, kwargs))
        name = getattr(func, "__name__", "")
        if func is torch._C._set_grad_enabled:
            self.tracer.changes_grad_mode = True
            if self.tracer.is_training:
                self.tracer.create_node("call_function", func, args, {})
            return func(*args, **kwargs)
        if any(isinstance(value, fx.Proxy) for value in flat) or (name in FACTORIES and _is_torch_builtin(func)):
            return self._lower(func, name, args, kwargs)
        if not any(isinstance(value, torch.Tensor) for value in flat) or not self._computes(func, name):
            return func(*args, **kwargs)
        return self._lower(func, name, args, kwargs)

    @staticmethod
    def _computes(func: Any, name: str) -> bool:
        return packet(name) is not None and name not in ("detach", "is_floating_point", "size", "dim", "is_complex")

    def _lower(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (
            name in FACTORIES
            and args
            and name not in ("full", "arange", "linspace", "eye", "randint", "randperm", "scalar_tensor")
        ):
            # torch.zeros(2, 3) means torch.zeros([2, 3])
            args = (
                (list(args),)
                if not isinstance(args[0], list | tuple) and self.tracer.kind_of(args[0]) is not Kind.SHAPE
                else args
            )
        if inspect.ismethoddescriptor(func) and name != "__get__" and args and name not in DUNDERS:
            return self.tracer.lower_method(name, args, kwargs)
        return self.tracer.lower_function(func, args, kwargs)


@contextmanager
def _python_functions_opened() -> Iterator[None]:
    """Let functions of torch that are written in Python run their bodies on traced values.

    They would hand over to `__torch_function__` whole as soon as they see one; but it is the ATen calls inside that
    the graph is made of.
    """
    with ExitStack() as stack:
        for module in (torch.nn.functional, torch.functional, torch._tensor):
            for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"):
                if hasattr(module, name):
                    stack.enter_context(patch.object(module, name, lambda *_: False))
        yield


@contextmanager
def _buffers_watched(tracer: AtenTracer) -> Iterator[None]:
    """Catch assignments of traced values to buffers."""
    original = nn.Module.__setattr__

    def assign(module: nn.Module, name: str, value: Any) -> None:
        if isinstance(value, Value) and tracer.assign_buffer(module, name, value):
            return
        original(module, name, value)

    with patch.object(nn.Module, "__setattr__", assign):
        yield


def _is_torch_builtin(function: Any) -> bool:
    """Whether a function is implemented in ATen (rather than written in Python)."""
    return inspect.isbuiltin(function) or inspect.ismethoddescriptor(function)


def _rank_known(args: tuple[Any, ...]) -> bool:
    return not args or not isinstance(args[0], Value) or args[0].fake is not None


def _shape_owner(node: fx.Node) -> fx.Node | None:
    """The tensor whose whole shape a node is."""
    if node.target is getattr and node.args[1] == "shape" and isinstance(node.args[0], fx.Node):
        return node.args[0]
    return None


def _type_name(kind: Any, root: nn.Module) -> str:
    kind = kind if isinstance(kind, type) else type(root)
    return f"{kind.__module__}.{kind.__qualname__}"
