"""Frozen state of training modules, kept in the state dict."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Freezable(nn.Module):
    """A module that stops learning from data when it is frozen. `state_dict` includes the flag."""

    frozen: bool

    def __init__(self) -> None:
        super().__init__()
        self.frozen = False

    @property
    def learns(self) -> bool:
        """True if the next input changes it."""
        return self.training and not self.frozen

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.frozen)

    def set_extra_state(self, state: Tensor) -> None:
        self.frozen = bool(state)
