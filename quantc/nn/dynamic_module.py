"""Dynamically quantized modules: floats in, floats out, run-time scales. Only weights are stored quantized, as int8 with a
scale, or as float16 without one."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from quantc.errors import LoadError, SpecError
from quantc.nn.kernel_ops import Run
from quantc.nn.observed_weights import observed_weight
from quantc.nn.quantized_module import QuantizedModule
from quantc.nn.quantized_tensor import QuantizedTensor, refuse_quantized
from quantc.nn.torch_tensors import HALF, State
from quantc.targets.kernels.packing import has_halves, multiply_halves_on_threads, packed_halves_for_threads

REDUCED, FULL = 127, 255
"""The highest level of inputs: with the first, sums of two products fit 16 bits, which QNNPACK does not need."""
SMALLEST_SCALE = 2.0**-14
LARGEST_HALF = torch.finfo(HALF).max
DTYPES = (torch.qint8, torch.int8, HALF)


def run_time_grid(target: str) -> dict[str, Any]:
    """Quantization arguments of the input, as the ops of the integer form take them last; the qparams are torch's."""
    span = FULL if target == "qnnpack" else REDUCED
    return {"x_zero_point": None, "qmin": 0, "qmax": span, "dtype": torch.uint8, "eps": SMALLEST_SCALE}


def weight_observers(mod: Any) -> Any:
    """Factory of weight observers: the qconfig's, or the default."""
    qconfig = getattr(mod, "qconfig", None)
    if qconfig is None or qconfig.weight is None:
        from quantc.nn.qconfig import default_dynamic_qconfig

        qconfig = default_dynamic_qconfig
    return qconfig.weight


def store_weight(weight: Tensor, make_observer: Any, where: str) -> QuantizedTensor | Tensor:
    """A weight as it is stored: quantized as its observer says, or as float16."""
    observer = make_observer()
    if observer.dtype not in DTYPES:
        raise SpecError(
            f"{where} stores its weights as int8 or float16, and the observer is for {observer.dtype}",
            where=where,
            advice="use default_dynamic_qconfig, per_channel_dynamic_qconfig or float16_dynamic_qconfig",
        )
    if observer.dtype is HALF:
        # what is too large for float16 becomes the largest there is, as in fbgemm
        return weight.detach().float().clamp(-LARGEST_HALF, LARGEST_HALF).to(HALF)
    return observed_weight(weight, observer)


class RunTime(QuantizedModule):
    """A module with weights by name, each `weight…` with its scale, and biases."""

    has_grid = False
    relu = False

    def optional(self) -> tuple[str, ...]:
        """Biases where there are none; and scales, which float16 has none of."""
        none = tuple(name for name in self.held if "bias" in name and self._buffers[name] is None)
        return (*none, *(name for name in self.held if name.endswith("_scale")))

    def why_not_load(self, state: dict[str, Any]) -> list[str]:
        bare = [
            f"{name} is of {value.dtype}, and there is no {name}_scale"
            for name, value in state.items()
            if f"{name}_scale" in self.held and value.dtype is not HALF and f"{name}_scale" not in state
        ]
        return super().why_not_load(state) + bare

    def weight_parts(self, name: str, weight: QuantizedTensor) -> State:
        parts = weight.parts()
        if bool(parts["zero_point"].any()):
            raise LoadError(f"{name} is not symmetric", where=type(self).__name__)
        return {name: parts["data"], f"{name}_scale": parts["scale"].float()}

    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation mode: there is nothing to train."""
        return super().train(False)

    def hold_weight(self, name: str, weight: QuantizedTensor | Tensor) -> None:
        if not isinstance(weight, QuantizedTensor):
            self.hold(name, weight.to(HALF))
            self.hold(f"{name}_scale", None)
            return
        if bool((torch.as_tensor(weight.zero_point_of) != 0).any()) or weight.axis_of not in (None, 0):
            raise SpecError(
                f"{type(self).__name__} takes symmetric weights, with one scale or one for each output",
                advice="use a symmetric weight observer, per tensor or with ch_axis=0",
            )
        self.hold(name, weight.data_of.contiguous())
        self.hold(f"{name}_scale", torch.as_tensor(weight.scale_of, dtype=torch.float32))

    def held_weight(self, name: str) -> QuantizedTensor | Tensor:
        levels, scale = self.tensor(name), self._buffers[f"{name}_scale"]
        if scale is None:
            return levels
        if not scale.dim():
            return QuantizedTensor(levels, float(scale), 0)
        return QuantizedTensor(levels, scale, torch.zeros(len(scale), dtype=torch.int64), 0)

    def float_input(self, x: Tensor) -> Tensor:
        refuse_quantized(x, type(self).__name__)
        return x

    def half_product(self, weight: str, bias: str) -> Run:
        """A product with a float16 weight, in float32."""
        matrix, added = self.tensor(weight).float(), self._buffers[bias]
        if not has_halves():
            return lambda x: functional.linear(x, matrix, added)
        packed = packed_halves_for_threads(matrix, added)

        def multiplied(x: Tensor) -> Tensor:
            rows = x if x.dim() > 1 else x.unsqueeze(0)
            made = multiply_halves_on_threads(rows.to(torch.float32), packed)
            return made if x.dim() > 1 else made.squeeze(0)

        return multiplied

    def _get_name(self) -> str:
        return f"DynamicQuantized{type(self).__name__}"


def source_of(mod: nn.Module) -> Any:
    """The layer of a sequence that ends in an activation; or the module itself."""
    return mod[0] if isinstance(mod, nn.Sequential) and not hasattr(mod, "weight") else mod
