"""Int8 linear layers on fbgemm and onednn.

fbgemm packs its weight once and is several times faster than onednn for few rows. onednn packs at every call, which
many rows amortize, and fuses activations.

Both accept float32 and quantize it themselves: fbgemm while it packs the rows, so that the uint8 tensor is never
written.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from quantc.integer.library import op_of
from quantc.ir.program import Program, attribute
from quantc.targets.kernels.dynamic_linear import Weight
from quantc.targets.kernels.float_epilogue import Ending
from quantc.targets.kernels.int8_elementwise import QuantizeKernel
from quantc.targets.kernels.kernel import Kernel, KernelForm, Work, check_columns
from quantc.targets.kernels.kernel_table import Call, NoKernelError, Placement, highest_level, kernel
from quantc.targets.kernels.packing import (
    linear_to_bytes,
    linear_to_floats,
    packed_linear,
    product_of_floats,
    product_of_quantized,
    quantized_rows,
    to_bytes,
    unpacked_linear,
)

FEW_ROWS = 16
"""Up to so many rows fbgemm is much the faster, so that the kernel of onednn asks it for help."""
ONEDNN: Any = torch.ops.onednn.qlinear_pointwise.default


@dataclass(frozen=True)
class Reading:
    """Input of a layer: uint8, or float32 that the layer quantizes."""

    zero_point: int
    highest: int
    """The highest level."""
    scale: float | None = None
    """Of the grid; None where bytes are read."""

    def levels(self, x: Tensor) -> Tensor:
        """The uint8 levels that are multiplied."""
        return x if self.scale is None else to_bytes(x, self.scale, self.zero_point, torch.uint8)


@dataclass(frozen=True)
class Activation:
    """Fused activation of a float result, and the grid its result is quantized to."""

    name: str
    """The name in the dialect."""
    post_op: str
    """The name in onednn, with its scalars and algorithm; empty if onednn has none."""
    scalars: tuple[float, ...]
    algorithm: str
    function: Callable[[Tensor], Tensor]
    """The function itself."""
    scale: float
    zero_point: int
    low: int
    high: int

    @property
    def bounds(self) -> tuple[int, int] | None:
        """Clamp bounds, if they are tighter than uint8."""
        return None if (self.low, self.high) == (0, 255) else (self.low, self.high)

    def rounded(self, reals: Tensor) -> Tensor:
        """Activation and quantization of a float result."""
        return to_bytes(self.function(reals), self.scale, self.zero_point, torch.uint8)


class Linear(Kernel):
    """GEMM of uint8 by int8 weights, with a requantized or float32 result."""

    any_order: ClassVar[bool] = True

    def __init__(self, weight: Weight, reading: Reading, ending: Ending, activation: Activation | None = None) -> None:
        super().__init__()
        self.register_buffer("weight", weight.levels)
        self.register_buffer("multiplier", weight.scale)
        self.register_buffer("bias", weight.bias)
        self.shape = weight.levels.shape
        """Outputs and inputs."""
        self.reading, self.ending, self.activation = reading, ending, activation
        self.relu = ending.is_relu
        self.outputs: list[int] = []
        """Number of columns of each layer's result, where this kernel runs several layers."""
        cut = None if ending.is_relu or not ending.cuts else (ending.low, ending.high)
        self.bounds = cut if activation is None else activation.bounds

    @property
    def plain(self) -> Weight:
        return Weight(self.get_buffer("weight"), self.get_buffer("multiplier"), self.optional_buffer("bias"))

    def levels_read(self, *inputs: Tensor) -> Tensor | None:
        return None if self.reading.scale is None else self.reading.levels(inputs[0])

    @property
    def pair_sums(self) -> tuple[Tensor, int]:
        return self.get_buffer("weight"), self.reading.highest

    def work(self, *inputs: Tensor) -> Work:
        outputs, columns = self.shape
        kind = "linear" if self.activation is None else f"linear + {self.activation.name}"
        ends = f"{inputs[0].dtype} to {self.result_dtype}".replace("torch.", "")
        return Work(kind, inputs[0].numel() // max(columns, 1), (columns, outputs), ends)

    def absorb(self, op: str) -> bool:
        if op != "relu" or not self.ending.is_float or self.activation is not None:
            return False
        self.relu = True
        self.forget_packed()
        return True

    @property
    def joins(self) -> Hashable:
        ending = self.ending
        if self.activation is not None:
            return None
        return self.reading, self.relu, ending.dtype, ending.zero_point, ending.low, ending.high

    @classmethod
    def joined(cls, kernels: Sequence[Kernel]) -> Kernel:
        layers = [layer for layer in kernels if isinstance(layer, Linear)]
        weight = Weight.stacked([layer.plain for layer in layers])
        one = cls(weight, layers[0].reading, replace(layers[0].ending, multiplier=weight.scale))
        one.outputs = [layer.shape[0] for layer in layers]
        one.relu = layers[0].relu
        one.in_order = any(layer.in_order for layer in layers)
        return one

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        x = inputs[0]
        rows, columns = self.shape
        check_columns(x, columns, self.name)
        if not x.numel():
            made = x.new_empty([*x.shape[:-1], rows], dtype=self.result_dtype)
        elif x.dim() > 1:
            made = self.product(packed, x)
        else:
            made = self.product(packed, x.unsqueeze(0)).squeeze(0)
        return self.ended(made)

    def ended(self, made: Tensor) -> Any:
        """Clamp the results and split them by sibling layer."""
        if self.bounds is not None:
            made.clamp_(*self.bounds)
        if not self.outputs:
            return made
        parts = torch.split(made, self.outputs, dim=-1)
        return tuple(part.contiguous() for part in parts) if self.in_order else parts

    @property
    def makes_memory(self) -> bool:
        return self.result_dtype is torch.float32 and not self.outputs

    def bound(self, packed: Any, reads: KernelForm, yields: KernelForm) -> Callable[..., Any]:
        product, columns = self.bound_product(packed, reads, yields), self.shape[1]
        is_whole = self.bounds is None and not self.outputs

        def step(x: Tensor) -> Any:
            if x.dim() < 2 or x.shape[-1] != columns or not x.numel():
                return self.run(packed, x)
            made = product(x)
            return made if is_whole else self.ended(made)

        return step

    def bound_product(self, packed: Any, reads: KernelForm, yields: KernelForm) -> Callable[[Tensor], Tensor]:
        """`product`, bound to the packed weight."""
        return partial(self.product, packed)

    @property
    def result_dtype(self) -> torch.dtype:
        return self.ending.dtype if self.activation is None else torch.uint8

    @abstractmethod
    def product(self, packed: Any, x: Tensor) -> Tensor:
        """GEMM of a non-empty tensor that has rows; sibling results are concatenated and not yet clamped."""

    def packed_for_fbgemm(self, levels: Tensor, multiplier: Tensor, bias: Tensor | None) -> Any:
        """Weight packed for `on_fbgemm`: weight scale times input scale is the multiplier."""
        scale = 1.0 if self.reading.scale is None else self.reading.scale
        return packed_linear("fbgemm", levels, multiplier.double() / scale, bias)

    def on_fbgemm(self, packed: Any, x: Tensor) -> Tensor:
        reading, ending = self.reading, self.ending
        if ending.is_float:
            made = linear_to_floats(x.contiguous(), reading.scale, reading.zero_point, packed, self.relu)
            return made if self.activation is None else self.activation.rounded(made)
        rows = quantized_rows(x.contiguous(), reading.scale, reading.zero_point)
        return linear_to_bytes(rows, packed, ending.zero_point, self.relu)

    def extra_repr(self) -> str:
        after = self.activation.name if self.activation is not None else "relu" if self.relu else ""
        before = "quantize + " if self.reading.scale is not None else ""
        return f"{before}{self.name}{after and f' + {after}'}"


class OnFbgemm(Linear):
    """Linear on fbgemm, which is memory-bound by the weight for few rows."""

    name: ClassVar[str] = "fbgemm qlinear"
    family: ClassVar[str] = "fbgemm"

    def pack(self) -> Any:
        weight = self.plain
        return self.packed_for_fbgemm(weight.levels, weight.scale, weight.bias)

    def unpack(self, packed: Any) -> dict[str, Tensor]:
        return {"weight": unpacked_linear(packed)}

    def product(self, packed: Any, x: Tensor) -> Tensor:
        return self.on_fbgemm(packed, x)

    def takes_quantized(self, rank: int) -> bool:
        return rank > 1

    @property
    def gives_quantized(self) -> bool:
        return not self.ending.is_float and self.bounds is None and not self.outputs

    def bound(self, packed: Any, reads: KernelForm, yields: KernelForm) -> Callable[..., Any]:
        if reads is KernelForm.PLAIN and yields is KernelForm.PLAIN:
            return super().bound(packed, reads, yields)
        product = self.bound_product(packed, reads, yields)
        is_whole = self.bounds is None and not self.outputs
        return product if is_whole else lambda x: self.ended(product(x))

    def bound_product(self, packed: Any, reads: KernelForm, yields: KernelForm) -> Callable[[Tensor], Tensor]:
        reading, ending, activation = self.reading, self.ending, self.activation
        if not ending.is_float:
            is_plain, scale, zero = reads is KernelForm.PLAIN, reading.scale, reading.zero_point
            multiply, ends = product_of_quantized(self.relu), ending.zero_point
            if yields is KernelForm.PLAIN:
                return lambda x: linear_to_bytes(
                    quantized_rows(x.contiguous(), scale, zero) if is_plain else x, packed, ends, self.relu
                )
            return lambda x: multiply(quantized_rows(x.contiguous(), scale, zero) if is_plain else x, packed, 1.0, ends)
        multiply = product_of_floats(self.relu)
        if reading.scale is None:
            before = (lambda x: quantized_rows(x.contiguous(), None, reading.zero_point).dequantize()) if (
                reads is KernelForm.PLAIN
            ) else Tensor.dequantize  # fmt: skip
            scale = 1.0
        else:
            before, scale = Tensor.contiguous, reading.scale
        if activation is None:
            return lambda x: multiply(before(x), scale, reading.zero_point, packed)
        return lambda x: activation.rounded(multiply(before(x), scale, reading.zero_point, packed))


class Later:
    """A lazily made value; thread-safe."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make, self._made, self._making = make, None, threading.Lock()

    def get(self) -> Any:
        if self._made is None:
            with self._making:
                if self._made is None:
                    self._made = self._make()
        return self._made


class OnOnednn(Linear):
    """Linear on onednn; for few rows on fbgemm, for which the weight is packed a second time, lazily."""

    name: ClassVar[str] = "onednn qlinear"
    family: ClassVar[str] = "onednn"

    def pack(self) -> Any:
        return self._pack_for(None)

    def pack_for(self, *inputs: Tensor) -> Any:
        """Packed for the first call's number of rows: onednn may use another weight layout for others."""
        rows = inputs[0].numel() // self.shape[1]
        return self._pack_for([rows, self.shape[1]] if rows > 0 else None)

    def _pack_for(self, shape: list[int] | None) -> Any:
        activation, ending = self.activation, self.ending
        multiplier, bias = self.get_buffer("multiplier"), self.optional_buffer("bias")
        packed = torch.ops.onednn.qlinear_prepack(self.get_buffer("weight").contiguous(), shape)
        few = Later(lambda: self.packed_for_fbgemm(_unpack(packed), multiplier, bias))
        numbers = (multiplier, torch.zeros(1, dtype=torch.int32), bias)
        if activation is None or not activation.post_op:
            result: tuple[Any, ...] = (1.0, ending.zero_point, ending.dtype, "relu" if self.relu else "none", [], "")
        else:
            after = (activation.post_op, list(activation.scalars), activation.algorithm)
            result = (activation.scale, activation.zero_point, torch.uint8, *after)
        return packed, few, (packed, *numbers, *result)

    def unpack(self, packed: Any) -> dict[str, Tensor]:
        return {"weight": _unpack(packed[0])}

    def product(self, packed: Any, x: Tensor) -> Tensor:
        _, few, settings = packed
        if x.numel() <= FEW_ROWS * x.shape[-1]:
            return self.on_fbgemm(few.get(), x)
        made: Tensor = ONEDNN(self.reading.levels(x).contiguous(), 1.0, self.reading.zero_point, *settings)
        activation = self.activation
        return made if activation is None or activation.post_op else activation.rounded(made)

    def bound_product(self, packed: Any, reads: KernelForm, yields: KernelForm) -> Callable[[Tensor], Tensor]:
        _, few, settings = packed
        scale, zero, activation = self.reading.scale, self.reading.zero_point, self.activation
        most_of_few = FEW_ROWS * self.shape[1]
        after = None if activation is None or activation.post_op else activation.rounded

        def product(x: Tensor) -> Tensor:
            if x.numel() <= most_of_few:
                return self.on_fbgemm(few.get(), x)
            levels = x if scale is None else to_bytes(x, scale, zero, torch.uint8)
            made: Tensor = ONEDNN(levels.contiguous(), 1.0, zero, *settings)
            return made if after is None else after(made)

        return product


def _unpack(packed: Tensor) -> Tensor:
    """The weight that onednn has packed: it lies there with outputs in columns."""
    return packed.to_dense().t().contiguous()


# -- who may have which ------------------------------------------------------------------------------------------------


def quantizer_before(program: Program, node: Any) -> QuantizeKernel | None:
    """Kernel that quantizes a node's float32 input to full-range uint8, if linear layers are its only users."""
    if not isinstance(node, fx.Node) or node.op != "call_module":
        return None
    found = attribute(program.owner(node.graph), str(node.target))
    if not isinstance(found, QuantizeKernel) or found.bounds is not None or found.grid[2] is not torch.uint8:
        return None
    return found if all(_is_linear(user) for user in node.users) else None


def _is_linear(node: fx.Node) -> bool:
    own = op_of(node.target)
    return own is not None and own.name == "linear"


def _is_by_output(bias: Any, outputs: int) -> bool:
    """True if a bias is a constant with one number per output, or one for all."""
    if not isinstance(bias, Tensor):
        return bias is None
    return bias.numel() == 1 or (bias.numel() == outputs == bias.shape[-1])


def parts_of(call: Call) -> tuple[Weight, Reading, Ending, tuple[Any, ...]]:
    """Weight, input and epilogue of a linear call, and the nodes it reads: the float tensor, if it is quantized for linear layers alone."""
    x: Any = call.node.args[0]
    kind = x.meta.get("val") if isinstance(x, fx.Node) else None
    if kind is None or kind.dtype is not torch.uint8:
        raise NoKernelError("the kernels multiply uint8")
    name = WEIGHTS[call.op]
    levels = call.tensor(name)
    if levels.dtype is not torch.int8 or not levels.numel() or call[f"{name}_zero_point"] is not None:
        raise NoKernelError("the kernels take symmetric int8 weights, which are not empty")
    if levels.dim() != 2:
        raise NoKernelError(f"the kernels multiply with one matrix, and the weight has {levels.dim()} axes")
    levels = levels if name == "w" else levels.t().contiguous()
    if not _is_by_output(call["bias"], len(levels)):
        raise NoKernelError("its bias is not one number for each output")
    if call["dtype"] is torch.int8:
        raise NoKernelError("the kernels yield uint8 or float32")
    ending = Ending.of(call)
    weight = Weight(levels, ending.by_channel(levels.shape[0]), ending.bias(call["bias"]))
    reading = Reading(call["x_zero_point"], highest_level(call.program, x))
    rounded = quantizer_before(call.program, x)
    if rounded is None:
        return weight, reading, ending, call.inputs
    return weight, replace(reading, scale=rounded.grid[0]), ending, (x.args[0],)


WEIGHTS = {"linear": "w", "matmul": "y"}
"""The name of the constant operand, by op: its outputs are rows for `linear`, columns for `matmul`."""


@kernel("x86", *WEIGHTS)
def onednn(call: Call) -> Placement:
    weight, reading, ending, inputs = parts_of(call)
    return Placement(OnOnednn(weight, reading, ending), inputs)


@kernel("x86", *WEIGHTS)
def fbgemm(call: Call) -> Placement:
    weight, reading, ending, inputs = parts_of(call)
    return Placement(OnFbgemm(weight, reading, ending), inputs)
