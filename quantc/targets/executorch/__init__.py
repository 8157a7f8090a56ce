"""Programs as ExecuTorch runs them: `.pte` files, XNNPACK's delegate, and what the delegate took."""

from quantc.targets.executorch.artifact import Pte
from quantc.targets.executorch.delegation import Delegation
from quantc.targets.executorch.reading import load

__all__ = ["Delegation", "Pte", "load"]
