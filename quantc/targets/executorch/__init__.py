"""ExecuTorch export: `.pte` files, the XNNPACK delegate, and the delegation report."""

from quantc.targets.executorch.artifact import Pte
from quantc.targets.executorch.delegation import Delegation
from quantc.targets.executorch.reading import load

__all__ = ["Delegation", "Pte", "load"]
