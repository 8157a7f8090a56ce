"""Values that follow a module's mode, without another graph."""

from __future__ import annotations

from torch import nn

from quantc.qat.modes import ModeFlag


def test_it_follows_the_mode_of_the_module_that_holds_it() -> None:
    holder = nn.Sequential(flag := ModeFlag(0.3, 0.0, "attention"))
    assert flag() == 0.3
    holder.eval()
    assert flag() == 0.0
    holder.train()
    assert flag() == 0.3


def test_frozen_it_gives_the_value_of_inference_in_either_mode() -> None:
    flag = ModeFlag(True, False, "batch_norm")
    flag.frozen = True
    assert (flag(), flag.eval()()) == (False, False)


def test_it_prints_whose_argument_it_is_and_both_values() -> None:
    flag = ModeFlag(1, 0, "batch_norm")
    for word in ("batch_norm", "1 in training", "else 0"):
        assert word in repr(flag)
    assert "frozen" not in repr(flag)
    flag.frozen = True
    assert "frozen" in repr(flag)
