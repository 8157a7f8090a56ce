"""Capture through torch.export: dimensions, open batches, fixed sizes."""
