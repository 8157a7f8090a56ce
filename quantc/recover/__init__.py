"""Recovery of the accuracy that rounding costs: weights fitted to what their layers read."""
