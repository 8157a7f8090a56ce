"""Observers under the names they have in torch, at their public path."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch.ao.quantization.observer as theirs

observers: Any = import_module("quantc.flows.observers")


def test_the_observers_of_torch_are_here() -> None:
    """Those of torchao's formats apart, which lie by torch's own for the time being."""
    public = {
        name for name in theirs.__all__ if name.endswith("Observer") or name.startswith(("default_", "get_", "load_"))
    }
    assert public - {"get_block_size"} <= set(observers.__all__)


def test_what_is_listed_is_there_once() -> None:
    assert len(set(observers.__all__)) == len(observers.__all__)
    assert [name for name in observers.__all__ if not hasattr(observers, name)] == []
