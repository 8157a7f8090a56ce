"""Base class of modules that run outside torch."""

from __future__ import annotations

import json
from abc import abstractmethod
from typing import Any, Self

from torch import nn

from quantc.errors import ModeError
from quantc.ir.program import Program


class Deployed(nn.Module):
    """A quantized program that runs outside torch. Called like the model; it has no gradients and no training mode."""

    @property
    @abstractmethod
    def program(self) -> Program:
        """The program that is run."""

    @property
    @abstractmethod
    def headline(self) -> str:
        """One-line summary."""

    @abstractmethod
    def to_data(self) -> dict[str, Any]:
        """Summary as JSON-compatible data."""

    def to_json(self) -> str:
        return json.dumps(self.to_data(), indent=2, ensure_ascii=False)

    def train(self, mode: bool = True) -> Self:
        """`eval()`, or an error."""
        if mode:
            raise ModeError(
                f"{self.headline}: it cannot be trained",
                where=self.program.name,
                advice="train the model itself, and quantize it again",
            )
        return super().train(False)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.headline}>"
