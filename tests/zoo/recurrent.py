"""Recurrent models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.case import Case, floats, tags, tokens


class Tagger(nn.Module):
    """Embedding, a recurrent layer, a label for each token."""

    def __init__(self, rnn: nn.Module, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 12)
        self.rnn = rnn
        self.head = nn.Linear(width, 5)

    def forward(self, ids: Tensor) -> Any:
        y, _ = self.rnn(self.embedding(ids))
        return self.head(y).log_softmax(-1)


class FinalState(nn.Module):
    """Two layers, both directions, dropout between them; gives sequence, hidden and cell states."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(10, 6, num_layers=2, bidirectional=True, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        y, (hidden, cell) = self.lstm(x)
        return y, torch.cat([hidden[-2], hidden[-1]], dim=1), cell


class GivenState(nn.Module):
    """An initial state that comes in from outside, time first."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(10, 6)

    def forward(self, x: Tensor, hidden: Tensor) -> Any:
        y, last = self.gru(x.transpose(0, 1), hidden.unsqueeze(0))
        return y.transpose(0, 1), last


class CellLoop(nn.Module):
    """A cell in a Python loop of fixed length."""

    def __init__(self, steps: int = 4) -> None:
        super().__init__()
        self.steps = steps
        self.cell = nn.LSTMCell(10, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Any:
        hidden = torch.zeros(x.size(0), 6)
        cell = torch.zeros(x.size(0), 6)
        outputs = []
        for step in range(self.steps):
            hidden, cell = self.cell(x[:, step], (hidden, cell))
            outputs.append(self.head(hidden))
        return torch.stack(outputs, dim=1)


class GRUCellLoop(nn.Module):
    """A cell unrolled over `unbind`, with the state taken from the input."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(6, 6)

    def forward(self, x: Tensor) -> Any:
        state = x[:, 0]
        for item in (x[:, 1], x[:, 2], x[:, 3]):
            state = self.cell(item, state)
        return state


class Elman(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.RNN(10, 6, batch_first=True)
        self.second = nn.RNN(6, 4, nonlinearity="relu", batch_first=True)

    def forward(self, x: Tensor) -> Any:
        y, _ = self.first(x)
        y, hidden = self.second(y)
        return y.sum(1), hidden


class Projected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(10, 8, proj_size=4, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.lstm(x)[0]


CASES = (
    Case("lstm_tagger", lambda: Tagger(nn.LSTM(12, 8, batch_first=True), 8), tokens(6), tags=tags("recurrent")),
    Case("gru_tagger", lambda: Tagger(nn.GRU(12, 8, batch_first=True), 8), tokens(6), tags=tags("recurrent")),
    Case("bidirectional_lstm", FinalState, floats(5, 10), tags=tags("recurrent")),
    Case("gru_given_state", GivenState, lambda b: (torch.randn(b, 5, 10), torch.randn(b, 6)), tags=tags("recurrent")),
    Case("lstm_cell_loop", CellLoop, floats(4, 10), tags=tags("recurrent")),
    Case("gru_cell_loop", GRUCellLoop, floats(4, 6), tags=tags("recurrent")),
    Case("elman", Elman, floats(5, 10), tags=tags("recurrent")),
    Case("projected_lstm", Projected, floats(5, 10), tags=tags("recurrent")),
)
