"""The quantized tensor: integers with the scale and zero point that say which numbers they stand for.

It is a `torch.Tensor`, so that models may ask `isinstance`, hand it to `nn.Flatten` or slice it; its dtype is that of its
integers, and it uses none of torch's quantized dtypes. Every op that reaches it is looked up in a table: those that move
numbers keep the grid, those that quantc computes on bytes run there, and any other is an error that names the op and the
module, since it would take levels for numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from quantc.errors import DataError, LoadError, MixedTensorsError
from quantc.nn.module_path import running_module
from quantc.spec.torch_dtypes import PLAIN
from quantc.targets.kernels.int8_elementwise import real
from quantc.targets.kernels.packing import hush, to_bytes

BYTES = (torch.uint8, torch.int8)
INTEGERS = (*BYTES, torch.int32)
Scale = float | Tensor
ZeroPoint = int | Tensor
Handler = Callable[..., Any]


class QuantizedTensor(Tensor):
    """Integers `data` that stand for `(data - zero_point) * scale`.

    Scale and zero point are numbers, or tensors with one element for each index along `axis`.
    """

    handlers: ClassVar[dict[Any, Handler]] = {}
    """Implementations of ATen ops on quantized tensors, filled by `moves` and `aten_ops`."""

    # ops are caught once torch has taken them apart: attributes such as `shape` cost nothing then
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    data_of: Tensor
    scale_of: Scale
    zero_point_of: ZeroPoint
    axis_of: int | None

    @staticmethod
    def __new__(cls, data: Tensor, scale: Scale, zero_point: ZeroPoint, axis: int | None = None) -> QuantizedTensor:
        made: QuantizedTensor = Tensor._make_wrapper_subclass(
            cls, data.shape, strides=data.stride(), dtype=data.dtype, device=data.device
        )
        return made

    def __init__(self, data: Tensor, scale: Scale, zero_point: ZeroPoint, axis: int | None = None) -> None:
        if data.dtype not in INTEGERS:
            raise DataError(
                f"a quantized tensor holds {', '.join(map(str, INTEGERS))}, not {data.dtype}",
                advice="quantize floats with quantc.nn.quantize_per_tensor",
            )
        self.data_of, self.scale_of, self.zero_point_of, self.axis_of = data, scale, zero_point, axis

    # -- reading -------------------------------------------------------------------------------------------------------

    def int_repr(self) -> Tensor:
        """The integers, a copy."""
        return self.data_of.clone()

    def q_scale(self) -> float:
        return float(self._of_whole(self.scale_of, "q_scale", "q_per_channel_scales"))

    def q_zero_point(self) -> int:
        return int(self._of_whole(self.zero_point_of, "q_zero_point", "q_per_channel_zero_points"))

    def q_per_channel_scales(self) -> Tensor:
        return self._of_channels(self.scale_of, "q_per_channel_scales", "q_scale")

    def q_per_channel_zero_points(self) -> Tensor:
        return self._of_channels(self.zero_point_of, "q_per_channel_zero_points", "q_zero_point")

    def q_per_channel_axis(self) -> int:
        self._of_channels(self.scale_of, "q_per_channel_axis", "q_scale")
        return -1 if self.axis_of is None else self.axis_of

    def qscheme(self) -> torch.qscheme:
        if self.axis_of is None:
            return torch.per_tensor_affine
        is_float = isinstance(self.zero_point_of, Tensor) and self.zero_point_of.is_floating_point()
        return torch.per_channel_affine_float_qparams if is_float else torch.per_channel_affine

    @property
    def is_quantized(self) -> bool:  # type: ignore[override]
        return True

    @property
    def grid(self) -> tuple[float, int]:
        """Scale and zero point of the whole tensor."""
        if self.axis_of is not None:
            self._of_whole(self.scale_of, "grid", "q_per_channel_scales")
        return self.scale_of, self.zero_point_of  # type: ignore[return-value]

    def _of_whole(self, value: Any, name: str, other: str) -> Any:
        if self.axis_of is not None:
            raise DataError(f"{name} is for tensors with one scale, and this has one by channel", advice=f"ask {other}")
        return value

    def _of_channels(self, value: Any, name: str, other: str) -> Tensor:
        if not isinstance(value, Tensor) or self.axis_of is None:
            raise DataError(f"{name} is for tensors with scales by channel, and this has one", advice=f"ask {other}")
        return value

    # -- numbers -------------------------------------------------------------------------------------------------------

    def dequantize(self) -> Tensor:
        """The numbers, as float32."""
        data = self.data_of
        if self.axis_of is None and data.dtype in BYTES and data.numel() and data.device.type == "cpu":
            hush()
            return real(data, *self.grid)
        scale, zero_point = self._along(self.scale_of), self._along(self.zero_point_of)
        numbers: Tensor = (data.to(torch.float32) - zero_point) * scale
        return numbers

    def _along(self, value: Any) -> Any:
        if self.axis_of is None or not isinstance(value, Tensor):
            return value
        shape = [1] * self.dim()
        shape[self.axis_of] = -1
        return value.to(torch.float32).reshape(shape)

    def like(self, data: Tensor) -> QuantizedTensor:
        """Other integers on the same grid."""
        return QuantizedTensor(data, self.scale_of, self.zero_point_of, self.axis_of)

    def equals(self, other: Any) -> bool:
        """True if another tensor has the same integers on the same grid."""
        mine, theirs = self.parts(), other.parts() if isinstance(other, QuantizedTensor) else {}
        return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)

    # -- in files ------------------------------------------------------------------------------------------------------

    def parts(self) -> dict[str, Tensor]:
        """Plain tensors to save, in a state dict or a safetensors file."""
        found = {
            "data": self.data_of,
            "scale": torch.as_tensor(self.scale_of, dtype=torch.float64),
            "zero_point": torch.as_tensor(self.zero_point_of),
        }
        return found if self.axis_of is None else {**found, "axis": torch.tensor(self.axis_of)}

    @staticmethod
    def from_parts(parts: Mapping[str, Tensor]) -> QuantizedTensor:
        """Rebuild a tensor from `parts`; further entries are an error."""
        needed = {"data", "scale", "zero_point"}
        if not needed <= parts.keys() <= needed | {"axis"}:
            raise LoadError(
                f"these are not the parts of a quantized tensor: {', '.join(sorted(parts))}",
                advice="give data, scale and zero_point, and axis where scales belong to channels",
            )
        scale, zero_point = parts["scale"], parts["zero_point"]
        if "axis" in parts:
            return QuantizedTensor(parts["data"], scale, zero_point, int(parts["axis"]))
        return QuantizedTensor(parts["data"], float(scale), int(zero_point))

    # -- torch's own ways ----------------------------------------------------------------------------------------------

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        handler = cls.handlers.get(func)
        if handler is not None:
            return handler(func, *args, **(kwargs or {}))
        # in inference mode torch leaves it to us to take ops apart that are made of others
        made = func.decompose(*args, **(kwargs or {}))
        if made is NotImplemented:
            raise float_op_error(func)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedTensor:
        parts = (self.data_of.clone(), copy.deepcopy(self.scale_of), copy.deepcopy(self.zero_point_of), self.axis_of)
        made = QuantizedTensor(*parts)
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return QuantizedTensor, (self.data_of, self.scale_of, self.zero_point_of, self.axis_of)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        numbers = repr(self.dequantize()).removeprefix("tensor(").removesuffix(")")
        kind = str(self.dtype).removeprefix("torch.")
        at = "" if self.axis_of is None else f", axis={self.axis_of}"
        return (
            f"QuantizedTensor({numbers}, size={tuple(self.shape)}, {kind}, scale={_number(self.scale_of)}, "
            f"zero_point={_number(self.zero_point_of)}{at})"
        )


def _number(value: Any) -> str:
    return repr(value.tolist()) if isinstance(value, Tensor) else repr(value)


def handles(*ops: Any) -> Callable[[Handler], Handler]:
    """Say what some of ATen's ops do to quantized tensors; the function is given the op, then what the op is given."""

    def add(handler: Handler) -> Handler:
        QuantizedTensor.handlers.update(dict.fromkeys(ops, handler))
        return handler

    return add


# -- making them -------------------------------------------------------------------------------------------------------


def quantize_per_tensor(x: Tensor, scale: float, zero_point: int, dtype: torch.dtype = torch.uint8) -> QuantizedTensor:
    """A float tensor on a grid. `dtype` is int8, uint8 or int32, or torch's name for the quantized one."""
    refuse_quantized(x, "quantize_per_tensor")
    plain, scale, zero_point = PLAIN.get(dtype, dtype), float(scale), int(zero_point)
    if plain in BYTES and x.numel() and x.device.type == "cpu":
        hush()
        return QuantizedTensor(to_bytes(x.detach().to(torch.float32), scale, zero_point, plain), scale, zero_point)
    return QuantizedTensor(_levels(x, scale, zero_point, plain), scale, zero_point)


def quantize_per_channel(
    x: Tensor, scales: Tensor, zero_points: Tensor, axis: int, dtype: torch.dtype = torch.int8
) -> QuantizedTensor:
    """A float tensor with a grid for each index along an axis. Zero points may be floats: then they are added first."""
    refuse_quantized(x, "quantize_per_channel")
    shape = [1] * x.dim()
    shape[axis] = -1
    levels = _levels(x, scales.float().reshape(shape), zero_points.reshape(shape), PLAIN.get(dtype, dtype))
    return QuantizedTensor(levels, scales, zero_points, axis % x.dim())


def _levels(x: Tensor, scale: Any, zero_point: Any, dtype: torch.dtype) -> Tensor:
    limits = torch.iinfo(dtype)
    is_float = isinstance(zero_point, Tensor) and zero_point.is_floating_point()
    steps = x.detach().to(torch.float32) * (1.0 / scale)
    levels = torch.round(steps + zero_point) if is_float else torch.round(steps) + zero_point
    return levels.clamp(limits.min, limits.max).to(dtype)


# -- what does not go together -----------------------------------------------------------------------------------------


def refuse_quantized(x: Any, what: str) -> None:
    if isinstance(x, QuantizedTensor):
        raise MixedTensorsError(
            f"{what} takes floats, and was given a quantized tensor",
            where=running_module() or None,
            advice="dequantize it first: put a DeQuantStub before, or leave out the second QuantStub",
        )


def check_quantized(x: Any, what: str) -> QuantizedTensor:
    """A tensor that must be quantized."""
    if isinstance(x, QuantizedTensor):
        return x
    kind = f"a tensor of {x.dtype}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
    raise MixedTensorsError(
        f"{what} takes quantized tensors, and was given {kind}",
        where=running_module() or None,
        advice="add a QuantStub before it: quantize the input of the model, or of the part that is quantized",
    )


def float_op_error(func: Any) -> MixedTensorsError:
    name = str(func)
    return MixedTensorsError(
        f"{name} was called with a quantized tensor, whose levels it would take for numbers",
        where=running_module() or None,
        advice="use a module of quantc.nn.quantized, or FloatFunctional for add, mul and cat; or put a DeQuantStub before",
    )
