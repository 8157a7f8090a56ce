"""A model's tensors during a trace: their names, and the node that is the current value of each."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode


class TensorState:
    """Names of parameters, buffers and constants, and the nodes that represent them.

    An in-place write makes another node the value of a buffer; later reads of the buffer must yield that one.
    """

    def __init__(self, fakes: FakeTensorMode | None) -> None:
        self.fakes = fakes
        self.constants: dict[str, torch.Tensor] = {}
        """Tensors made in `forward`, and tensors that are plain attributes of modules."""
        self.names: dict[int, str] = {}
        self.current: dict[str, fx.Node] = {}
        """The node that is each tensor's value now."""
        self.source: dict[str, fx.Node] = {}
        """The get_attr node of each tensor."""
        self.assigned: dict[str, fx.Node] = {}
        """Buffers that `forward` assigns, with their get_attr nodes."""
        self._tensors: dict[str, torch.Tensor] = {}
        self._name_of: dict[fx.Node, str] = {}
        self._fakes_made: dict[int, Any] = {}

    def learn(self, model: nn.Module) -> None:
        """Register the names of a model's tensors; a tied tensor uses its first name."""
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        for name, tensor in named:
            self.names.setdefault(id(tensor), name)
            self._tensors[name] = tensor
        for path, module in model.named_modules():
            for name, tensor in vars(module).items():
                is_new = isinstance(tensor, torch.Tensor) and id(tensor) not in self.names
                if is_new and not hasattr(nn.Module, name):  # a buffer cannot be called `double`, say
                    full = f"{path}.{name}" if path else name
                    self.names[id(tensor)] = full
                    self.constants[full] = tensor

    @property
    def device(self) -> torch.device:
        """Device of the model's tensors; the CPU if it has none."""
        return next((tensor.device for tensor in self._tensors.values()), torch.device("cpu"))

    def real(self, node: fx.Node) -> torch.Tensor | None:
        """The model's tensor that a node reads."""
        return self._tensors.get(str(node.target)) if node.op == "get_attr" else None

    def knows(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self.names

    def name(self, tensor: torch.Tensor) -> str:
        """Name of a tensor; an unnamed one becomes a constant."""
        found = self.names.get(id(tensor))
        if found is None:
            found = f"_tensor_constant{len(self.constants)}"
            self.names[id(tensor)] = found
            self.constants[found] = tensor  # also keeps the tensor, and so its id, alive
        return found

    def enter(self, name: str, node: fx.Node) -> None:
        """Register `node` as the get_attr of the tensor called `name`."""
        self.current[name] = self.source[name] = node
        self._name_of[node] = name

    def moved(self, old: fx.Node, new: fx.Node) -> None:
        """Replace the current value `old` by `new`."""
        name = self._name_of.get(old)
        if name is not None:
            self.current[name] = new
            self._name_of[new] = name

    def assign(self, name: str, node: fx.Node) -> None:
        """Set the buffer called `name` to the value `node`, unless it has that value already."""
        if self._name_of.get(node) == name:
            return
        self.assigned.setdefault(name, self.source[name])
        self.current[name] = node
        self._name_of[node] = name

    def fake(self, tensor: torch.Tensor) -> Any:
        """Fake tensor of a real one; None if shapes are not tracked."""
        if self.fakes is None:
            return None
        if id(tensor) not in self._fakes_made:
            with torch._C.DisableTorchFunction():
                self._fakes_made[id(tensor)] = self.fakes.from_tensor(tensor.detach(), static_shapes=True)
        return self._fakes_made[id(tensor)]
