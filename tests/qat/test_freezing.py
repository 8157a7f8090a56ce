"""The frozen flag of training modules: it stops learning, and goes with the state dict."""

from __future__ import annotations

import io

import pytest
import torch

from quantc.qat.freezing import Freezable


@pytest.mark.parametrize(
    ("training", "frozen", "learns"),
    [(True, False, True), (True, True, False), (False, False, False), (False, True, False)],
)
def test_it_learns_in_training_mode_until_it_is_frozen(training: bool, frozen: bool, learns: bool) -> None:
    module = Freezable().train(training)
    module.frozen = frozen
    assert module.learns is learns


@pytest.mark.parametrize("frozen", [True, False])
def test_the_flag_survives_a_file_and_overrides_the_one_it_meets(frozen: bool) -> None:
    module, other = Freezable(), Freezable()
    module.frozen, other.frozen = frozen, not frozen
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert other.frozen is frozen
