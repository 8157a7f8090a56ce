"""What the caller of capture gave besides the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

AUTO = "auto"
"""The `dynamic_shapes` that leave it to capture which sizes are open."""


@dataclass(frozen=True)
class Request:
    """What the caller of capture gave besides the model; `args` is None where there are no example inputs."""

    args: tuple[Any, ...] | None
    kwargs: dict[str, Any]
    dynamic_shapes: Any
    leaf: tuple[Any, ...]

    @property
    def is_auto(self) -> bool:
        """Whether capture may choose which sizes are open."""
        return isinstance(self.dynamic_shapes, str) and self.dynamic_shapes == AUTO
