"""Recurrent layers and cells that find the scales of what they multiply as they run.

A class is a row: its kind, by torch's name. What a kind computes is in the integer form's table of them.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from quantc.errors import DataError, SpecError
from quantc.integer.ops.recurrent import KINDS, Layout, unrolled
from quantc.kernels import engines
from quantc.nn.on_kernels import Run, engine_number, on_kernel, target
from quantc.nn.quantized_tensor import QuantizedTensor
from quantc.nn.run_time import FULL, HALF, RunTime, run_time_grid, stored, weight_observers

GATES = {"LSTM": 4, "GRU": 3, "RNN_TANH": 1, "RNN_RELU": 1}
"""How many times the state's size the weights have, by torch's name of the kind."""
OVER_SEQUENCES = {"lstm": engines.lstm_dynamic, "gru": engines.gru_dynamic}
OVER_PACKED = {"lstm": engines.lstm_of_packed, "gru": engines.gru_of_packed}
ENGINES = {"x86": "fbgemm", "qnnpack": "qnnpack"}


class _Recurrent(RunTime):
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
        self.held = tuple(part for name in sizes for part in (name, f"{name}_scale", _bias(name)))
        self._buffers.update(dict.fromkeys(self.held))
        for name, size in sizes.items():
            zeros = torch.zeros(size)
            self.hold_weight(name, zeros.to(HALF) if dtype is HALF else QuantizedTensor(zeros.to(torch.int8), 1.0, 0))
            self.hold(_bias(name), torch.zeros(size[0]) if self.bias else None)
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
        return {_bias(name): self._buffers[_bias(name)] for name in self.weight_names}

    def set_weight_bias(self, weight_bias: dict[str, Any]) -> None:
        for name in self.weight_names:
            self.hold_weight(name, weight_bias[name])
            self.hold(_bias(name), weight_bias.get(_bias(name)))

    def _take(self, mod: Any) -> None:
        observers = weight_observers(mod)
        for name in self.weight_names:
            self.hold_weight(name, stored(getattr(mod, name), observers, type(self).__name__))
            self.hold(_bias(name), getattr(mod, _bias(name)).detach().float().clone() if self.bias else None)

    def packed(self, kind: str) -> list[Any]:
        """Weights and biases as torch's ops take them."""
        each = [(name, self._buffers[_bias(name)]) for name in self.weight_names]
        if self.is_half:
            return [engines.packed_halves_for_threads(self.tensor(name).float(), bias) for name, bias in each]
        engine = ENGINES[kind]
        return [engines.packed_linear(engine, self.tensor(name), self.tensor(f"{name}_scale"), b) for name, b in each]

    def products(self) -> list[Run]:
        """With float16 weights."""
        return [self.half_product(name, _bias(name)) for name in self.weight_names]

    def listed(self, hx: Any) -> list[Tensor]:
        return list(hx) if self.states > 1 else [hx]

    def given(self, state: list[Tensor]) -> Any:
        return tuple(state) if self.states > 1 else state[0]


def _bias(weight: str) -> str:
    return weight.replace("weight", "bias", 1)


class RNNBase(_Recurrent):
    """Layers over sequences: `mode` is "LSTM", "GRU", "RNN_TANH" or "RNN_RELU"."""

    _FLOAT_MODULE: ClassVar[Any] = nn.RNNBase
    only: ClassVar[str] = ""
    """The mode of a class that has one."""

    def __init__(
        self,
        mode: str,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        dtype: torch.dtype = torch.qint8,
    ) -> None:
        super().__init__()
        if mode not in GATES:
            raise SpecError(f"there is no recurrent layer {mode!r}", advice=f"take one of {', '.join(GATES)}")
        self.mode, self.input_size, self.hidden_size, self.num_layers = mode, input_size, hidden_size, num_layers
        self.bias, self.batch_first, self.dropout, self.bidirectional = bias, batch_first, float(dropout), bidirectional
        gates, directions = GATES[mode] * hidden_size, 2 if bidirectional else 1
        sizes: dict[str, tuple[int, int]] = {}
        for layer in range(num_layers):
            read = input_size if layer == 0 else hidden_size * directions
            for suffix in ("", "_reverse")[:directions]:
                sizes[f"weight_ih_l{layer}{suffix}"] = (gates, read)
                sizes[f"weight_hh_l{layer}{suffix}"] = (gates, hidden_size)
        self._hold_all(sizes, dtype)

    @property
    def layout(self) -> Layout:
        return Layout(self.num_layers, self.bidirectional, self.batch_first)

    @classmethod
    def from_float(cls, mod: Any, use_precomputed_fake_quant: bool = False) -> Any:
        """The dynamic form of a float layer, by its mode."""
        is_one = isinstance(mod, nn.RNNBase) and not mod.proj_size
        if not is_one or (cls.only or mod.mode) != mod.mode:
            raise SpecError(
                f"{cls.__name__} is made of recurrent layers that do not project their state, not of {mod}",
                where=f"{cls.__name__}.from_float",
            )
        settings = (mod.input_size, mod.hidden_size, mod.num_layers, mod.bias, mod.batch_first, mod.dropout)
        kind: Any = CLASSES[mod.mode]
        made = kind(*settings, mod.bidirectional)
        made._take(mod)
        return made

    # -- running -------------------------------------------------------------------------------------------------------

    def forward(self, input: Any, hx: Any = None) -> Any:  # noqa: A002 - torch's name
        if isinstance(input, PackedSequence):
            return self._of_packed(input, hx)
        x = self.float_input(input)
        if x.dim() == 2:  # one sequence alone
            at = 0 if self.batch_first else 1
            state = None if hx is None else self.given([part.unsqueeze(1) for part in self.listed(hx)])
            made, last = self.forward(x.unsqueeze(at), state)
            return made.squeeze(at), self.given([part.squeeze(1) for part in self.listed(last)])
        state = self._state(hx, x.shape[0 if self.batch_first else 1], x)
        engine = engine_number()
        run = self.kernels.get(engine) or self.kernels.made(engine, lambda: self._kernel(target(), x, state))
        sequence, *last = run(x, *state)
        return sequence, self.given(last)

    def _state(self, hx: Any, batch: int, x: Tensor) -> list[Tensor]:
        size = (self.num_layers * self.layout.directions, batch, self.hidden_size)
        if hx is None:
            return [x.new_zeros(size, dtype=torch.float32)] * self.states
        state = self.listed(hx)
        if any(part.shape != size for part in state):
            raise DataError(
                f"the state of {type(self).__name__} has the shape {size}, and was given "
                f"{', '.join(str(tuple(part.shape)) for part in state)}",
            )
        return state

    def _kernel(self, kind: str, x: Tensor, state: list[Tensor]) -> Run:
        layout = (self.num_layers, self.bidirectional, self.batch_first)
        if self.is_half:
            return self._half_kernel(layout)
        biases = [bias for bias in self.get_bias().values() if bias is not None]
        arguments = {
            "weights": [self.tensor(name) for name in self.weight_names],
            "scales": [self.tensor(f"{name}_scale") for name in self.weight_names],
            "biases": biases,
            "num_layers": self.num_layers,
            "bidirectional": self.bidirectional,
            "batch_first": self.batch_first,
            "per_token": False,
            **run_time_grid(kind),
        }
        hx = state if self.states > 1 else state[0]
        return on_kernel(kind, f"{self.kind}_dynamic", [x, hx], arguments)

    def _half_kernel(self, layout: tuple[int, bool, bool]) -> Run:
        if self.kind in OVER_SEQUENCES and engines.has_halves():
            cells = self._half_cells()
            return lambda x, *state: OVER_SEQUENCES[self.kind](x, list(state), cells, *layout)
        each = self.products()
        pairs = list(zip(each[::2], each[1::2], strict=True))
        return lambda x, *state: unrolled(KINDS[self.kind], self.layout, x, state, pairs)

    def _half_cells(self) -> list[Any]:
        each = [(self.tensor(name).float(), self._buffers[_bias(name)]) for name in self.weight_names]
        return [engines.packed_half_cell(ih, hh) for ih, hh in zip(each[::2], each[1::2], strict=True)]

    def _cells(self, kind: str) -> list[Any]:
        """Packed for torch's ops over whole sequences."""
        if self.is_half:
            return self._half_cells()
        packed = self.packed(kind)
        reduced = run_time_grid(kind)["qmax"] != FULL
        return [engines.packed_cell(ih, hh, reduced) for ih, hh in zip(packed[::2], packed[1::2], strict=True)]

    def _of_packed(self, sequences: PackedSequence, hx: Any) -> Any:
        """Sequences of several lengths."""
        if self.kind not in OVER_PACKED:
            raise DataError(f"{type(self).__name__} takes no packed sequences", advice="pad them")
        x = self.float_input(sequences.data)
        state = self._state(hx, int(sequences.batch_sizes[0]), x)
        if hx is not None and sequences.sorted_indices is not None:
            state = [part.index_select(1, sequences.sorted_indices) for part in state]
        kind = target()
        layout = (self.num_layers, self.bidirectional)
        cells: Any = self.kernels.made(("packed", kind), lambda: self._cells(kind))  # type: ignore[arg-type, return-value]
        made, *last = OVER_PACKED[self.kind](x, sequences.batch_sizes, state, cells, *layout)
        if sequences.unsorted_indices is not None:
            last = [part.index_select(1, sequences.unsorted_indices) for part in last]
        order = (sequences.sorted_indices, sequences.unsorted_indices)
        return PackedSequence(made, sequences.batch_sizes, *order), self.given(last)

    def extra_repr(self) -> str:
        plain: dict[str, Any] = {
            "num_layers": 1,
            "bias": True,
            "batch_first": False,
            "dropout": 0.0,
            "bidirectional": False,
        }
        others = [f"{name}={getattr(self, name)}" for name, value in plain.items() if getattr(self, name) != value]
        return ", ".join([str(self.input_size), str(self.hidden_size), *others, f"dtype={self.dtype}"])


class _Layers(RNNBase):
    def __init_subclass__(cls, mode: str, of: type[nn.Module]) -> None:
        super().__init_subclass__()
        cls.only, cls._FLOAT_MODULE = mode, of
        CLASSES[mode] = cls

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(self.only, *args, **kwargs)


CLASSES: dict[str, type[RNNBase]] = {}
"""By mode."""


class LSTM(_Layers, mode="LSTM", of=nn.LSTM): ...


class GRU(_Layers, mode="GRU", of=nn.GRU): ...


class RNN(_Layers, mode="RNN_TANH", of=nn.RNN): ...


class RNNReLU(_Layers, mode="RNN_RELU", of=nn.RNN): ...


class RNNCellBase(_Recurrent):
    """One step."""

    mode_of_class: ClassVar[str] = ""

    def __init_subclass__(cls, mode: str, of: type[nn.Module]) -> None:
        super().__init_subclass__()
        cls.mode_of_class, cls._FLOAT_MODULE = mode, of

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        nonlinearity: str = "tanh",
        dtype: torch.dtype = torch.qint8,
    ) -> None:
        super().__init__()
        self.nonlinearity = nonlinearity
        self.mode = self.mode_of_class.replace("?", nonlinearity.upper())
        self.input_size, self.hidden_size, self.bias = input_size, hidden_size, bias
        gates = GATES[self.mode] * hidden_size
        self._hold_all({"weight_ih": (gates, input_size), "weight_hh": (gates, hidden_size)}, dtype)

    @classmethod
    def from_float(cls, mod: Any, use_precomputed_fake_quant: bool = False) -> Self:
        if not isinstance(mod, cls._FLOAT_MODULE):
            raise SpecError(
                f"{cls.__name__} is made of {cls._FLOAT_MODULE.__name__}, not of {type(mod).__name__}",
                where=f"{cls.__name__}.from_float",
            )
        made = cls(mod.input_size, mod.hidden_size, mod.bias, getattr(mod, "nonlinearity", "tanh"))
        made._take(mod)
        return made

    def forward(self, input: Tensor, hx: Any = None) -> Any:  # noqa: A002
        x = self.float_input(input)
        if x.dim() == 1:
            state = None if hx is None else self.given([part.unsqueeze(0) for part in self.listed(hx)])
            made = self.forward(x.unsqueeze(0), state)
            return self.given([part.squeeze(0) for part in self.listed(made)])
        zeros = [x.new_zeros(len(x), self.hidden_size)] * self.states
        state = zeros if hx is None else self.listed(hx)
        engine = engine_number()
        run = self.kernels.get(engine) or self.kernels.made(engine, lambda: self._kernel(target(), x, state))
        return run(x, *state)

    def _kernel(self, kind: str, x: Tensor, state: list[Tensor]) -> Run:
        if self.is_half:
            of_input, of_state = self.products()
            step = KINDS[self.kind].step
            return lambda x, *state: self.given(list(step(of_input(x), state, of_state)))
        arguments = {
            "w_ih": self.tensor("weight_ih"),
            "w_hh": self.tensor("weight_hh"),
            "ih_scale": self.tensor("weight_ih_scale"),
            "hh_scale": self.tensor("weight_hh_scale"),
            "b_ih": self._buffers["bias_ih"],
            "b_hh": self._buffers["bias_hh"],
            "per_token": False,
            **run_time_grid(kind),
        }
        hx = state if self.states > 1 else state[0]
        return on_kernel(kind, f"{self.kind}_cell_dynamic", [x, hx], arguments)

    def extra_repr(self) -> str:
        without = "" if self.bias else ", bias=False"
        how = f", nonlinearity={self.nonlinearity}" if "?" in self.mode_of_class and self.nonlinearity != "tanh" else ""
        return f"{self.input_size}, {self.hidden_size}{without}{how}, dtype={self.dtype}"


class LSTMCell(RNNCellBase, mode="LSTM", of=nn.LSTMCell): ...


class GRUCell(RNNCellBase, mode="GRU", of=nn.GRUCell): ...


class RNNCell(RNNCellBase, mode="RNN_?", of=nn.RNNCell): ...


__all__ = ["GRU", "LSTM", "RNN", "GRUCell", "LSTMCell", "RNNBase", "RNNCell"]
