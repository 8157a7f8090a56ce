"""Capture through torch.export: dynamic dimensions, dynamic batches, fixed sizes."""
