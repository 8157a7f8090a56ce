"""Values that follow the mode of a module as it runs, so that `.train()` and `.eval()` need no other graph."""

from __future__ import annotations

from quantc.qat.freezing import Freezable


class ModeFlag(Freezable):
    """Gives one value while it trains and another while it does not; frozen, it gives the other always."""

    def __init__(self, train: bool | float, other: bool | float, op: str = "") -> None:
        super().__init__()
        self.train_value = train
        self.eval_value = other
        self.op = op
        """Whose argument it is."""

    def forward(self) -> bool | float:
        return self.train_value if self.learns else self.eval_value

    def extra_repr(self) -> str:
        return f"{self.op}: {self.train_value} in training, else {self.eval_value}{', frozen' if self.frozen else ''}"
