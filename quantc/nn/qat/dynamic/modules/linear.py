"""The linear layer that is trained to be converted to a dynamic one."""

from __future__ import annotations

from typing import Any

from quantc.errors import SpecError
from quantc.nn.qat.modules import linear


class Linear(linear.Linear):
    """Its weight is fake-quantized; what it reads is, by an observer that starts anew with each batch."""

    def set_up(self, **own: Any) -> None:
        fake = self.qconfig.activation()  # type: ignore[union-attr]
        observer = getattr(fake, "activation_post_process", fake)
        is_kept = hasattr(observer, "min_val") and getattr(observer, "averaging_constant", None) != 1
        if is_kept and not getattr(observer, "is_dynamic", False):
            raise SpecError(
                "a dynamic linear layer finds the range of each batch anew, and its observer remembers earlier ones",
                advice="use default_dynamic_qat_qconfig",
            )


__all__ = ["Linear"]
