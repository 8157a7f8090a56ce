"""Capture by symbolic tracing with torch.fx."""
