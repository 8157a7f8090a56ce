"""LSTMs step by step, in modules that can be quantized statically: each step is linear layers, sums and products."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from quantc.errors import InputError, SpecError
from quantc.nn.quantized.modules.functional_modules import FloatFunctional
from quantc.nn.quantized_tensor import QuantizedTensor, quantize_per_tensor

State = tuple[Tensor, Tensor]
PARTS = ("weight", "bias")


class LSTMCell(nn.Module):
    """`nn.LSTMCell`, observed. Sigmoids and hyperbolic tangents need no observer: the grids of their results are known."""

    _FLOAT_MODULE: ClassVar[Any] = nn.LSTMCell

    def __init__(self, input_dim: int, hidden_dim: int, bias: bool = True) -> None:
        super().__init__()
        self.input_size, self.hidden_size, self.bias = input_dim, hidden_dim, bias
        self.igates, self.hgates = (
            nn.Linear(input_dim, 4 * hidden_dim, bias),
            nn.Linear(hidden_dim, 4 * hidden_dim, bias),
        )
        self.gates, self.kept, self.new = FloatFunctional(), FloatFunctional(), FloatFunctional()
        self.cell_state, self.hidden_state = FloatFunctional(), FloatFunctional()

    def forward(self, x: Tensor, hidden: State | None = None) -> State:
        h, c = self.start(x) if hidden is None else hidden
        gates = self.gates.add(self.igates(x), self.hgates(h))
        let_in, keep, new, let_out = gates.chunk(4, -1)
        kept = self.kept.mul(torch.sigmoid(keep), c)
        added = self.new.mul(torch.sigmoid(let_in), torch.tanh(new))
        c = self.cell_state.add(kept, added)
        return self.hidden_state.mul(torch.sigmoid(let_out), torch.tanh(c)), c

    def start(self, x: Tensor) -> State:
        """A state of zeros, on the grids of the states."""
        zeros = torch.zeros(*x.shape[:-1], self.hidden_size, device=x.device)
        if not isinstance(x, QuantizedTensor):
            return zeros.to(x.dtype), zeros.to(x.dtype)
        h, c = (_on_grid_of(maker, zeros) for maker in (self.hidden_state, self.cell_state))
        return h, c

    @classmethod
    def from_params(cls, source: nn.Module, ending: str = "") -> Self:
        """A cell with the parameters of a float one, or of a layer, whose names have an ending."""
        names = {f"{gates}gates.{part}": f"{part}_{gates}h{ending}" for part in PARTS for gates in ("i", "h")}
        held: dict[str, Any] = {name: getattr(source, given, None) for name, given in names.items()}
        found: dict[str, Tensor] = {name: value for name, value in held.items() if value is not None}
        width = found["igates.weight"].shape[1]
        made = cls(width, found["hgates.weight"].shape[1], "igates.bias" in found)
        made.load_state_dict(found)
        return made

    @classmethod
    def from_float(cls, other: nn.LSTMCell, use_precomputed_fake_quant: bool = False) -> Self:
        made = cls.from_params(other)
        vars(made)["qconfig"] = getattr(other, "qconfig", None)
        return made.train(other.training)


def _on_grid_of(maker: Any, x: Tensor) -> Tensor:
    """Round a float tensor to the grid of a quantized functional module."""
    scale, zero_point = maker.grid
    return quantize_per_tensor(x, scale, zero_point, maker.out_dtype)


class _Layer(nn.Module):
    """A layer of an LSTM: a cell, and for both directions a second one, whose results are joined on a grid of their own."""

    def __init__(self, forwards: LSTMCell, backwards: LSTMCell | None) -> None:
        super().__init__()
        self.forwards = forwards
        if backwards is not None:
            self.backwards, self.joined = backwards, FloatFunctional()

    @property
    def cells(self) -> tuple[LSTMCell, ...]:
        return (self.forwards, self.backwards) if "backwards" in self._modules else (self.forwards,)

    def forward(self, x: Tensor, states: list[State | None]) -> tuple[Tensor, list[State]]:
        results, ends = [], []
        for number, (cell, state) in enumerate(zip(self.cells, states, strict=True)):
            steps = range(len(x))
            made: list[Tensor] = []
            for step in reversed(steps) if number else steps:
                state = cell(x[step], state)
                made.append(state[0])
            if state is None or not made:
                raise InputError("the sequence has no steps", where="LSTM", advice="give at least one, as to nn.LSTM")
            results.append(torch.stack(made[::-1] if number else made))
            ends.append(state)
        return (results[0] if len(results) == 1 else self.joined.cat(results, -1)), ends


class LSTM(nn.Module):
    """`nn.LSTM`, observed; reads quantized tensors once it is converted, and yields them, states too."""

    _FLOAT_MODULE: ClassVar[Any] = nn.LSTM

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
    ) -> None:
        super().__init__()
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.bias, self.batch_first, self.bidirectional = bias, batch_first, bidirectional
        self.dropout = float(dropout)
        if self.dropout:
            warnings.warn("dropout between the layers of a quantizable LSTM is left out", stacklevel=2)
        widths = [input_size, *[hidden_size * (1 + bidirectional)] * (num_layers - 1)]
        cells = [[LSTMCell(width, hidden_size, bias) for _ in range(1 + bidirectional)] for width in widths]
        self._take(cells)

    def _take(self, cells: list[list[LSTMCell]]) -> None:
        self.layers = nn.ModuleList(_Layer(row[0], row[1] if len(row) > 1 else None) for row in cells)
        if sum(map(len, cells)) > 1:
            self.hidden_states, self.cell_states = FloatFunctional(), FloatFunctional()

    def forward(self, x: Tensor, hidden: State | None = None) -> tuple[Tensor, State]:
        is_single = x.dim() == 2
        x = x.unsqueeze(1) if is_single else x.transpose(0, 1) if self.batch_first else x
        given = iter(self._first_states(hidden, is_single))
        ends: list[State] = []
        for layer in self.layers:
            x, own = layer(x, [next(given) for _ in layer.cells])  # type: ignore[union-attr]
            ends += own
        h, c = (self._join_states(name, [end[index] for end in ends]) for index, name in enumerate(STATES))
        if is_single:
            return x.squeeze(1), (h.squeeze(1), c.squeeze(1))
        return (x.transpose(0, 1) if self.batch_first else x), (h, c)

    def _first_states(self, hidden: State | None, is_single: bool) -> list[State | None]:
        """The states that cells start from."""
        count = self.num_layers * (1 + self.bidirectional)
        if hidden is None:
            return [None] * count
        h, c = (part.unsqueeze(1) if is_single else part for part in hidden)
        return [(h[index], c[index]) for index in range(count)]

    def _join_states(self, name: str, parts: list[Tensor]) -> Tensor:
        """The last states of all cells, on one grid."""
        rows = [part.unsqueeze(0) for part in parts]
        made: Tensor = rows[0] if len(rows) == 1 else self._modules[name].cat(rows, 0)  # type: ignore[union-attr, operator]
        return made

    @classmethod
    def from_float(cls, other: nn.LSTM) -> Self:
        if other.proj_size:
            raise SpecError(
                "an LSTM that projects its states has no quantized form",
                where=f"{cls.__name__}.from_float",
                advice="leave it float: give it the qconfig None",
            )
        made = cls(
            other.input_size, other.hidden_size, other.num_layers, other.bias, other.batch_first,
            bidirectional=other.bidirectional,
        )  # fmt: skip
        endings = ["", "_reverse"][: 1 + other.bidirectional]
        made._take(
            [[LSTMCell.from_params(other, f"_l{layer}{end}") for end in endings] for layer in range(other.num_layers)]
        )
        vars(made)["qconfig"] = getattr(other, "qconfig", None)
        return made.train(other.training)

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}, num_layers={self.num_layers}"


STATES = ("hidden_states", "cell_states")

__all__ = ["LSTM", "LSTMCell"]
