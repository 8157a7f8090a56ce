"""Programs as ExecuTorch runs them: `.pte` files, XNNPACK's delegate, and what the delegate took."""

from quantc.executorch.artifact import Pte
from quantc.executorch.delegation import Delegation
from quantc.executorch.reading import load

__all__ = ["Delegation", "Pte", "load"]
