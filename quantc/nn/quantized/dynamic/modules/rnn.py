"""Dynamically quantized recurrent layers.

A class is a row: its kind, by torch's name. The integer form's table defines the computation of each kind.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from quantc.errors import DataError, SpecError
from quantc.integer.ops.recurrent import KINDS, Layout, unroll
from quantc.nn.dynamic_module import FULL, run_time_grid
from quantc.nn.kernel_ops import Run, engine_number, on_kernel, target
from quantc.nn.quantized.dynamic.modules.cells import GRUCell, LSTMCell, RNNCell, RNNCellBase
from quantc.nn.recurrent_weights import GATES, Recurrent, bias_of
from quantc.nn.torch_tensors import State, weight_apart
from quantc.targets.kernels import packing

CELLS = re.compile(r"_all_weight_values\.(\d+)\.param")
"""The entries of a layer and direction in torch.ao's state dicts."""
OVER_SEQUENCES = {"lstm": packing.lstm_dynamic, "gru": packing.gru_dynamic}
OVER_PACKED = {"lstm": packing.lstm_of_packed, "gru": packing.gru_of_packed}


class RNNBase(Recurrent):
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
            raise SpecError(f"unknown recurrent layer {mode!r}", advice=f"take one of {', '.join(GATES)}")
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

    def taken_apart(self, name: str, value: Any) -> State:
        cells = CELLS.fullmatch(name)
        if cells is None:
            return super().taken_apart(name, value)
        first = 2 * int(cells[1])
        pairs = [part.__getstate__()[0] for part in value.__getstate__()[0][4]]
        names = self.weight_names[first : first + 2]
        each = zip(names, *zip(*pairs, strict=True), strict=True)
        states = [weight_apart(name, weight, bias, self.weight_parts) for name, weight, bias in each]
        return {key: part for state in states for key, part in state.items()}

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
        if self.kind in OVER_SEQUENCES and packing.has_halves():
            cells = self._half_cells()
            return lambda x, *state: OVER_SEQUENCES[self.kind](x, list(state), cells, *layout)
        each = self.products()
        pairs = list(zip(each[::2], each[1::2], strict=True))
        return lambda x, *state: unroll(KINDS[self.kind], self.layout, x, state, pairs)

    def _half_cells(self) -> list[Any]:
        each = [(self.tensor(name).float(), self._buffers[bias_of(name)]) for name in self.weight_names]
        return [packing.packed_half_cell(ih, hh) for ih, hh in zip(each[::2], each[1::2], strict=True)]

    def _cells(self, kind: str) -> list[Any]:
        """Packed for torch's ops over whole sequences."""
        if self.is_half:
            return self._half_cells()
        packed = self.packed(kind)
        reduced = run_time_grid(kind)["qmax"] != FULL
        return [packing.packed_cell(ih, hh, reduced) for ih, hh in zip(packed[::2], packed[1::2], strict=True)]

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


__all__ = ["GRU", "LSTM", "RNN", "GRUCell", "LSTMCell", "RNNBase", "RNNCell", "RNNCellBase"]
