"""Values that depend on a module's mode at run time, so that `.train()` and `.eval()` need no other graph."""

from __future__ import annotations

from quantc.qat.freezing import Freezable


class ModeFlag(Freezable):
    """Yields one value in training and another in eval mode; frozen, always the latter."""

    def __init__(self, train: bool | float, other: bool | float, op: str = "") -> None:
        super().__init__()
        self.train_value = train
        self.eval_value = other
        self.op = op
        """The op whose argument it is."""

    def forward(self) -> bool | float:
        return self.train_value if self.learns else self.eval_value

    def extra_repr(self) -> str:
        return f"{self.op}: {self.train_value} in training, else {self.eval_value}{', frozen' if self.frozen else ''}"
