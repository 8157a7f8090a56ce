"""Quantized modules that compute in float32 between two roundings: normalizations, whose parameters stay float.

They are few numbers, and the statistics they are applied with are float anyway.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from quantc.nn.quantized_module import grid_of
from quantc.nn.quantized_tensor import INTEGERS, QuantizedTensor, check_quantized, quantize_per_tensor
from quantc.nn.scripting import refuse_script, refuse_trace


class InFloat(nn.Module):
    """To be put before a float module: what that makes of the numbers, on a grid.

    Arguments are those of the float module, with weight, bias, scale and zero point after the first `leading`.
    """

    leading: ClassVar[int] = 1
    relu: ClassVar[bool] = False
    _FLOAT_MODULE: ClassVar[Any] = None
    __prepare_scriptable__ = refuse_script
    _slow_forward = refuse_trace

    def __init_subclass__(
        cls, fused: type[nn.Module] | None = None, leading: int | None = None, relu: bool = False
    ) -> None:
        super().__init_subclass__()
        cls._FLOAT_MODULE = fused or cls.__mro__[2]
        cls.leading = cls.leading if leading is None else leading
        cls.relu = relu

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = dict(
            zip(("weight", "bias", "scale", "zero_point"), args[self.leading : self.leading + 4], strict=False)
        )
        given |= {name: kwargs.pop(name) for name in ("weight", "scale", "zero_point") if name in kwargs}
        if isinstance(kwargs.get("bias"), Tensor):
            given["bias"] = kwargs.pop("bias")
        super().__init__(*args[: self.leading], *args[self.leading + 4 :], **kwargs)
        for name in ("weight", "bias"):
            if given.get(name) is not None:
                setattr(self, name, nn.Parameter(given[name].detach().clone(), requires_grad=False))
        self.scale, self.zero_point = float(given.get("scale", 1.0)), int(given.get("zero_point", 0))
        self.out_dtype = torch.uint8
        self.requires_grad_(False).eval()

    def forward(self, input: Tensor) -> QuantizedTensor:  # noqa: A002 - torch's name
        numbers = check_quantized(input, type(self).__name__).dequantize()
        made: Tensor = super().forward(numbers)
        return quantize_per_tensor(made.relu_() if self.relu else made, self.scale, self.zero_point, self.out_dtype)

    def train(self, mode: bool = True) -> Self:
        """Stay as converted: statistics are not counted any more."""
        return super().train(False)

    @classmethod
    def from_float(cls, mod: Any, use_precomputed_fake_quant: bool = False) -> Self:
        source = mod[0] if isinstance(mod, nn.Sequential) else mod
        made = cls._copy_of(source)
        observer = getattr(mod, "activation_post_process", None)
        made.scale, made.zero_point, made.out_dtype = grid_of(observer, cls.__name__)
        return made

    @classmethod
    def from_reference(cls, mod: nn.Module, scale: float, zero_point: int) -> Self:
        made = cls._copy_of(mod)
        made.scale, made.zero_point = float(scale), int(zero_point)
        return made

    @classmethod
    def _copy_of(cls, source: nn.Module) -> Self:
        """One with the settings and tensors of a float module."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        skipped = ("qconfig", "activation_post_process")
        own = {name: value for name, value in source.__dict__.items() if name not in made.__dict__}
        made.__dict__.update({name: value for name, value in own.items() if name not in skipped})
        for name, parameter in source._parameters.items():
            kept = None if parameter is None else nn.Parameter(parameter.detach().clone(), requires_grad=False)
            made._parameters[name] = kept
        made._buffers.update({name: None if b is None else b.clone() for name, b in source._buffers.items()})
        made.out_dtype = torch.uint8
        return made.eval()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}scale"] = torch.tensor(self.scale, dtype=torch.float64)
        destination[f"{prefix}zero_point"] = torch.tensor(self.zero_point, dtype=self.out_dtype)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        found = {name: state_dict.pop(f"{prefix}{name}", None) for name in ("scale", "zero_point")}
        missing_keys.extend(f"{prefix}{name}" for name, value in found.items() if value is None)
        if None not in found.values():
            self.scale, self.zero_point = float(found["scale"]), int(found["zero_point"])
            if found["zero_point"].dtype in INTEGERS:
                self.out_dtype = found["zero_point"].dtype
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def extra_repr(self) -> str:
        return ", ".join([super().extra_repr(), f"scale={self.scale:.6g}, zero_point={self.zero_point}"])

    def _get_name(self) -> str:
        return f"Quantized{type(self).__name__}"
