"""The other name that ExecuTorch's documents have for capturing a model: `exir.capture`."""

from quantc.flows.executorch.export import capture_pre_autograd_graph as capture

__all__ = ["capture"]
