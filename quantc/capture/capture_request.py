"""Arguments of a capture besides the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

AUTO = "auto"
"""The `dynamic_shapes` that leave it to capture which sizes are open."""


@dataclass(frozen=True)
class Request:
    """Arguments of capture besides the model; `args` is None without example inputs."""

    args: tuple[Any, ...] | None
    kwargs: dict[str, Any]
    dynamic_shapes: Any
    leaf: tuple[Any, ...]

    @property
    def is_auto(self) -> bool:
        """True if capture may choose the dynamic dimensions."""
        return isinstance(self.dynamic_shapes, str) and self.dynamic_shapes == AUTO
