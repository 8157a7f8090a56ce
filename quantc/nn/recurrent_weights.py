"""Base of recurrent layers and cells: weights of input and state in turn, with their biases."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quantc.integer.ops.recurrent import KINDS
from quantc.nn.dynamic_module import RunTime, store_weight, weight_observers
from quantc.nn.kernel_ops import Run
from quantc.nn.quantized_tensor import QuantizedTensor
from quantc.nn.torch_tensors import HALF
from quantc.targets.kernels import packing

GATES = {"LSTM": 4, "GRU": 3, "RNN_TANH": 1, "RNN_RELU": 1}
"""Number of gates by torch's name of the mode: rows of a weight per element of the state."""
ENGINES = {"x86": "fbgemm", "qnnpack": "qnnpack"}


class Recurrent(RunTime):
    """Weights of input and state in turn, under the names they have in the float module."""

    mode: str
    input_size: int
    hidden_size: int
    bias: bool
    weight_names: tuple[str, ...]
    """Of input and state in turn; a bias is called like its weight."""

    def _hold_all(self, sizes: dict[str, tuple[int, int]], dtype: torch.dtype) -> None:
        self.weight_names = tuple(sizes)
        self.states = KINDS[self.kind].states
        self.held = tuple(part for name in sizes for part in (name, f"{name}_scale", bias_of(name)))
        self._buffers.update(dict.fromkeys(self.held))
        for name, size in sizes.items():
            zeros = torch.zeros(size)
            self.hold_weight(name, zeros.to(HALF) if dtype is HALF else QuantizedTensor(zeros.to(torch.int8), 1.0, 0))
            self.hold(bias_of(name), torch.zeros(size[0]) if self.bias else None)
        self.training = False

    @property
    def kind(self) -> str:
        return self.mode.lower()

    @property
    def is_half(self) -> bool:
        return self.tensor(self.weight_names[0]).dtype is HALF

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor(self.weight_names[0]).dtype

    def get_weight(self) -> dict[str, QuantizedTensor | Tensor]:
        return {name: self.held_weight(name) for name in self.weight_names}

    def get_bias(self) -> dict[str, Tensor | None]:
        return {bias_of(name): self._buffers[bias_of(name)] for name in self.weight_names}

    def set_weight_bias(self, weight_bias: dict[str, Any]) -> None:
        for name in self.weight_names:
            self.hold_weight(name, weight_bias[name])
            self.hold(bias_of(name), weight_bias.get(bias_of(name)))

    def _take(self, mod: Any) -> None:
        observers = weight_observers(mod)
        for name in self.weight_names:
            self.hold_weight(name, store_weight(getattr(mod, name), observers, type(self).__name__))
            self.hold(bias_of(name), getattr(mod, bias_of(name)).detach().float().clone() if self.bias else None)

    def packed(self, kind: str) -> list[Any]:
        """Weights and biases as torch's ops take them."""
        each = [(name, self._buffers[bias_of(name)]) for name in self.weight_names]
        if self.is_half:
            return [packing.packed_halves_for_threads(self.tensor(name).float(), bias) for name, bias in each]
        engine = ENGINES[kind]
        return [packing.packed_linear(engine, self.tensor(name), self.tensor(f"{name}_scale"), b) for name, b in each]

    def products(self) -> list[Run]:
        """With float16 weights."""
        return [self.half_product(name, bias_of(name)) for name in self.weight_names]

    def listed(self, hx: Any) -> list[Tensor]:
        return list(hx) if self.states > 1 else [hx]

    def given(self, state: list[Tensor]) -> Any:
        return tuple(state) if self.states > 1 else state[0]


def bias_of(weight: str) -> str:
    return weight.replace("weight", "bias", 1)
