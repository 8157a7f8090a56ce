"""What can be frozen in a program that trains, and is kept with its state."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Freezable(nn.Module):
    """A module that stops learning from the data when it is frozen. `state_dict` says whether it is."""

    frozen: bool

    def __init__(self) -> None:
        super().__init__()
        self.frozen = False

    @property
    def learns(self) -> bool:
        """Whether what comes next changes it."""
        return self.training and not self.frozen

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.frozen)

    def set_extra_state(self, state: Tensor) -> None:
        self.frozen = bool(state)
