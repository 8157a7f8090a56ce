"""LSTMs step by step: in float they are torch's, whatever the layers, directions and states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from quantc.errors import InputError, SpecError
from quantc.nn.quantizable import LSTM, LSTMCell
from quantc.nn.quantized.modules.functional_modules import FloatFunctional


def close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("settings", [{}, {"num_layers": 2}, {"bidirectional": True}, {"bias": False}])
@pytest.mark.parametrize("batch_first", [False, True])
def test_results_and_states_are_torchs(settings: dict[str, Any], batch_first: bool) -> None:
    torch.manual_seed(0)
    source = nn.LSTM(4, 5, batch_first=batch_first, **settings).eval()
    made = LSTM.from_float(source)
    x = torch.randn(3, 3, 4)
    close(made(x), source(x))
    cells = source.num_layers * (1 + source.bidirectional)
    state = (torch.randn(cells, 3, 5), torch.randn(cells, 3, 5))
    close(made(x, state), source(x, state))
    alone = (state[0][:, 0], state[1][:, 0])
    close(made(x[0], alone), source(x[0], alone))


def test_a_cell_is_torchs_with_or_without_a_state() -> None:
    torch.manual_seed(0)
    source = nn.LSTMCell(4, 5)
    made = LSTMCell.from_float(source)
    x, state = torch.randn(2, 4), (torch.randn(2, 5), torch.randn(2, 5))
    close(made(x), source(x))
    close(made(x, state), source(x, state))


def test_every_step_has_a_place_for_an_observer() -> None:
    cell = LSTMCell(4, 5)
    places = {name for name, part in cell.named_modules() if isinstance(part, FloatFunctional)}
    assert places == {"gates", "kept", "new", "cell_state", "hidden_state"}
    both = LSTM(4, 5, bidirectional=True)
    joined = {name for name, part in both.named_children() if isinstance(part, FloatFunctional)}
    assert joined == {"hidden_states", "cell_states"}
    assert not any(isinstance(part, FloatFunctional) for part in LSTM(4, 5).children()), "one cell has nothing to join"


def test_the_mode_and_the_qconfig_are_those_of_the_float_module() -> None:
    source = nn.LSTM(4, 5).train()
    vars(source)["qconfig"] = "its config"
    made = LSTM.from_float(source)
    assert made.training
    assert vars(made)["qconfig"] == "its config"
    assert not LSTM.from_float(nn.LSTM(4, 5).eval()).training


def test_what_it_cannot_do_is_said() -> None:
    with pytest.warns(UserWarning, match="dropout"):
        LSTM(4, 5, 2, dropout=0.5)
    with pytest.raises(SpecError, match="project"):
        LSTM.from_float(nn.LSTM(4, 5, proj_size=2))
    with pytest.raises(InputError, match="no steps"):
        LSTM(4, 5)(torch.randn(0, 2, 4))
