"""Dynamically quantized recurrent layers: torch's ops for sequences and cells, or step by step.

torch's ops find scales in one way only: affine, per tensor, not below 2^-14. They hide non-finite values, so those are
checked for and left to the integer form. Everything else, and layers that torch has no op for, runs the steps of the
integer form on the kernels of linear layers.

Differences from the integer form are those of the linear kernels: biases are added in float32, and a value halfway
between two levels may round to the other one.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from quantc.integer.library import OPS
from quantc.integer.ops.recurrent import KINDS, Kind, Layout, Product, unroll
from quantc.targets.kernels.dynamic_linear import LinearDynamic, OfRows, OfWhole, Weight
from quantc.targets.kernels.dynamic_quantization import RunTimeGrid
from quantc.targets.kernels.kernel import Kernel, check_columns
from quantc.targets.kernels.kernel_table import Call, NoKernelError, Placement, kernel
from quantc.targets.kernels.packing import UNUSED, gru_dynamic, lstm_dynamic, packed_cell, packed_linear

REDUCED, FULL = 127, 255
"""The highest level of an activation, where sums of two products must fit 16 bits and where they need not."""
SMALLEST_SCALE = 2.0**-14
SMALL_STATE = 2048
"""With states of up to so many elements, what autograd notes of the many small ops of a step takes longer than a copy of
the result, which is needed where nothing is noted."""
LINEAR: Any = torch.ops.quantized.linear_dynamic.default
SEQUENCES: dict[str, Callable[..., Any]] = {"lstm": lstm_dynamic, "gru": gru_dynamic}
"""Those that torch takes through all steps itself."""
CELLS: dict[str, Callable[..., Any]] = {
    name: getattr(torch.ops.quantized, f"quantized_{name}_cell_dynamic").default for name in KINDS
}
"""torch's ops for one step. Their levels end at 127."""


def _rnn(activation: Callable[[Tensor], Tensor]) -> Kind:
    """The step of an RNN, on the memory of the product."""
    return Kind(lambda given, state, product: (activation(product(state[0]).add_(given)),), 1, "")


IN_PLACE = {"rnn_tanh": _rnn(torch.tanh_), "rnn_relu": _rnn(torch.relu_)}


@dataclass(frozen=True)
class Parts:
    """A recurrent op's kind, its weights for input and state alternately, and its quantization."""

    kind: str
    weights: tuple[Weight, ...]
    grid: RunTimeGrid
    per_token: bool
    written: tuple[Any, ...]
    """The last arguments of the op of the integer form."""
    layout: Layout | None
    """None for a cell."""
    looked_at: tuple[int, ...]
    """Indices of the inputs that may hold NaN or infinity."""

    @property
    def is_torchs(self) -> bool:
        """True if torch's ops would find the same scales."""
        return not self.per_token and self.grid.middle is None and self.grid.eps >= SMALLEST_SCALE


class Recurrent(Kernel):
    """Base of recurrent kernels: layers over a sequence, or a cell."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.kind = parts.kind
        self.layout = parts.layout
        self.grid = parts.grid
        self.written = parts.written
        self.looked_at = parts.looked_at

    @property
    @abstractmethod
    def weights(self) -> tuple[Weight, ...]:
        """Weights for input and state alternately."""

    def is_for(self, parts: Parts) -> bool:
        """True if this kernel computes an op of these parts."""
        settings = (parts.kind, parts.layout, parts.written, parts.looked_at)
        if (self.kind, self.layout, self.written, self.looked_at) != settings:
            return False
        return all(_same(*pair) for pair in zip(self.weights, parts.weights, strict=True))

    @property
    def pair_sums(self) -> tuple[Tensor, int] | None:
        """All weights concatenated by rows, narrow ones padded with zeros."""
        weights = [weight.levels for weight in self.weights]
        widest = max(weight.shape[1] for weight in weights)
        return torch.cat([functional.pad(weight, (0, widest - weight.shape[1])) for weight in weights]), self.grid.span


def _same(one: Weight, other: Weight) -> bool:
    if one.levels.data_ptr() != other.levels.data_ptr() or one.levels.shape != other.levels.shape:
        return False
    both = one.bias is not None and other.bias is not None and torch.equal(one.bias, other.bias)
    return torch.equal(one.scale, other.scale) and (both or one.bias is other.bias)


class OnTorchsOps(Recurrent):
    """Kernels on torch's ops, with weights as buffers and a fallback where torch's ops differ visibly from the integer form."""

    engine: ClassVar[str]

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.count = len(parts.weights)
        self.columns = tuple(weight.levels.shape[1] for weight in parts.weights[:2])
        for index, weight in enumerate(parts.weights):
            self.register_buffer(f"weight_{index}", weight.levels)
            self.register_buffer(f"scale_{index}", weight.scale)
            self.register_buffer(f"bias_{index}", weight.bias)

    @property
    def weights(self) -> tuple[Weight, ...]:
        return tuple(
            Weight(
                self.get_buffer(f"weight_{index}"),
                self.get_buffer(f"scale_{index}"),
                self.optional_buffer(f"bias_{index}"),
            )
            for index in range(self.count)
        )

    def packed_weights(self) -> list[Any]:
        """Packed weights; empty if a bias is not finite, which torch's ops would hide."""
        if not all(weight.bias is None or _is_finite(weight.bias) for weight in self.weights):
            return []
        return [packed_linear(self.engine, weight.levels, weight.scale, weight.bias) for weight in self.weights]

    @property
    def reduced(self) -> bool:
        return self.grid.span == REDUCED

    def product(self, weight: Any) -> Product:
        reduced = self.reduced
        return lambda x: LINEAR(x, weight, reduced)

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        x, *state = inputs
        check_columns(x, self.columns[0], self.name)
        check_columns(state[0], self.columns[1], self.name)
        if not packed or not _is_finite(*[inputs[index] for index in self.looked_at]):
            return self.as_written(x, state)
        return self.on_kernel(packed, x, state)

    @abstractmethod
    def on_kernel(self, packed: Any, x: Tensor, state: list[Tensor]) -> Any:
        """Result of torch's op, for finite inputs."""

    def state(self, state: list[Tensor]) -> Any:
        """The state as ops take it: a list only if it has two tensors."""
        return state if KINDS[self.kind].states > 1 else state[0]

    def as_written(self, x: Tensor, state: list[Tensor]) -> Any:
        """Result of the integer op."""
        hx = self.state(state)
        weights, scales = ([getattr(w, name) for w in self.weights] for name in ("levels", "scale"))
        biases = [weight.bias for weight in self.weights]
        if self.layout is None:
            return OPS[f"{self.kind}_cell_dynamic"].target(x, hx, *weights, *scales, *biases, *self.written)
        given, layout = [bias for bias in biases if bias is not None], _arguments(self.layout)
        return OPS[f"{self.kind}_dynamic"].target(x, hx, weights, scales, given, *layout, *self.written)


class Sequences(OnTorchsOps):
    """All layers over a whole sequence."""

    def pack(self) -> Any:
        weights = self.packed_weights()
        pairs = zip(weights[::2], weights[1::2], strict=True)
        if self.kind in SEQUENCES:
            return [packed_cell(ih, hh, self.reduced) for ih, hh in pairs]
        return [(self.product(ih), self.product(hh)) for ih, hh in pairs]

    def on_kernel(self, packed: Any, x: Tensor, state: list[Tensor]) -> Any:
        layout = self.layout
        if layout is None:
            raise ValueError("a cell is no sequence")
        if self.kind in SEQUENCES and state[0].numel() <= SMALL_STATE and not torch.is_inference_mode_enabled():
            with torch.inference_mode():
                made = SEQUENCES[self.kind](x, state, packed, *_arguments(layout))
            return tuple(part.clone(memory_format=torch.contiguous_format) for part in made)
        if self.kind in SEQUENCES:
            sequence, *last = SEQUENCES[self.kind](x, state, packed, *_arguments(layout))
            return sequence.contiguous(), *last
        made = unroll(IN_PLACE[self.kind], layout, x, state, packed)
        # without a bound on the state it may have grown beyond all bounds
        return made if self.kind != "rnn_relu" or _is_finite(made[0]) else self.as_written(x, state)


class FbgemmSequences(Sequences):
    name: ClassVar[str] = "fbgemm layers over sequences"
    engine: ClassVar[str] = "fbgemm"


class QnnpackSequences(Sequences):
    name: ClassVar[str] = "QNNPACK layers over sequences"
    engine: ClassVar[str] = "qnnpack"

    @property
    def pair_sums(self) -> tuple[Tensor, int] | None:
        return None


class FbgemmCell(OnTorchsOps):
    """One step of a cell."""

    name: ClassVar[str] = "fbgemm cell"
    engine: ClassVar[str] = "fbgemm"

    def pack(self) -> Any:
        return self.packed_weights()

    def on_kernel(self, packed: Any, x: Tensor, state: list[Tensor]) -> Any:
        if self.reduced:
            return CELLS[self.kind](x, self.state(state), *packed, UNUSED, UNUSED)
        of_input, of_state = (self.product(weight) for weight in packed)
        kind = KINDS[self.kind]
        made = kind.step(of_input(x), tuple(state), of_state)
        return made if kind.states > 1 else made[0]


class QnnpackCell(FbgemmCell):
    name: ClassVar[str] = "QNNPACK cell"
    engine: ClassVar[str] = "qnnpack"

    @property
    def pair_sums(self) -> tuple[Tensor, int] | None:
        return None


class StepByStep(Recurrent):
    """Layers or a cell, with each GEMM on a linear kernel."""

    name: ClassVar[str] = "linear layers, step by step"

    def __init__(self, parts: Parts, product: type[LinearDynamic]) -> None:
        super().__init__(parts)
        self.products = nn.ModuleList(product(weight, parts.grid) for weight in parts.weights)

    @property
    def weights(self) -> tuple[Weight, ...]:
        return tuple(product.plain for product in self.products if isinstance(product, LinearDynamic))

    def pack(self) -> Any:
        products = [product.forward for product in self.products]
        return list(zip(products[::2], products[1::2], strict=True))

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        x, *state = inputs
        kind = KINDS[self.kind]
        if self.layout is not None:
            return unroll(kind, self.layout, x, state, packed)
        ((of_input, of_state),) = packed
        made = kind.step(of_input(x), tuple(state), of_state)
        return made if kind.states > 1 else made[0]

    @property
    def pair_sums(self) -> tuple[Tensor, int] | None:
        adds_pairs = all(isinstance(product, Kernel) and product.pair_sums is not None for product in self.products)
        return super().pair_sums if adds_pairs else None


def _is_finite(*tensors: Tensor) -> bool:
    """True if no tensor contains NaN or infinity; an overflowing sum counts as infinity."""
    return all(math.isfinite(tensor.sum().item()) for tensor in tensors)


def _arguments(layout: Layout) -> tuple[int, bool, bool]:
    return layout.num_layers, layout.bidirectional, layout.batch_first


# -- makers --------------------------------------------------------------------------------------------------------

LAYERS = tuple(f"{name}_dynamic" for name in KINDS)
STEPS = tuple(f"{name}_cell_dynamic" for name in KINDS)
PARTS = ("weights", "scales", "biases")
WRITTEN = ("per_token", "x_zero_point", "qmin", "qmax", "dtype", "eps")


@kernel("x86", *LAYERS, *STEPS)
def fbgemm(call: Call) -> Placement:
    return _place(call, _parts(call), _on_fbgemm)


def _on_fbgemm(parts: Parts) -> Kernel:
    if parts.is_torchs and parts.grid.span in (REDUCED, FULL):
        return FbgemmCell(parts) if parts.layout is None else FbgemmSequences(parts)
    return StepByStep(parts, OfRows if parts.per_token else OfWhole)


@kernel("qnnpack", *LAYERS, *STEPS)
def qnnpack(call: Call) -> Placement:
    parts = _parts(call)
    if not parts.is_torchs:
        raise NoKernelError("the kernel finds one affine scale for all that it reads, not below 2^-14")
    if parts.grid.span != FULL:
        raise NoKernelError(f"the kernel quantizes to 0..{FULL}, not to {call['qmin']}..{call['qmax']}")
    return _place(call, parts, _on_qnnpack)


def _on_qnnpack(parts: Parts) -> Kernel:
    return QnnpackCell(parts) if parts.layout is None else QnnpackSequences(parts)


def _place(call: Call, parts: Parts, make: Callable[[Parts], Kernel]) -> Placement:
    """A kernel for a call: the one of an earlier call with the same weights, so that those are packed once.

    A cell in a loop over time is one call for each step.
    """
    earlier = (kernel for kernel in call.program.root.modules() if isinstance(kernel, Recurrent))
    found = next((kernel for kernel in earlier if kernel.is_for(parts)), None)
    return Placement(make(parts) if found is None else found, _inputs(call))


def _parts(call: Call) -> Parts:
    kind = call.op.removesuffix("_dynamic").removesuffix("_cell")
    is_cell = call.op in STEPS
    names = (("w_ih", "w_hh"), ("ih_scale", "hh_scale"), ("b_ih", "b_hh"))
    given = [[call[name] for name in each] for each in names] if is_cell else [call[name] for name in PARTS]
    weights, scales, biases = given
    each = zip(weights, scales, biases or [None] * len(weights), strict=True)
    found = tuple(Weight(*(_constant(call, value) for value in triple)) for triple in each)  # type: ignore[arg-type]
    if any(weight.levels.dtype is not torch.int8 or not weight.levels.numel() for weight in found):
        raise NoKernelError("the kernel takes matrices of int8 that are not empty")
    layout = None if is_cell else Layout(call["num_layers"], call["bidirectional"], call["batch_first"])
    written = tuple(call[name] for name in WRITTEN)
    return Parts(kind, found, RunTimeGrid.of(call), call["per_token"], written, layout, _inputs_to_check(call))


def _inputs_to_check(call: Call) -> tuple[int, ...]:
    """The inputs that are computed, or constants that are not finite. Of a cell's state h alone is multiplied."""
    if call.op in STEPS:
        return 0, 1
    tensors = [call.program.tensor(node) for node in _inputs(call)]
    return tuple(index for index, tensor in enumerate(tensors) if tensor is None or not _is_finite(tensor))


def _constant(call: Call, value: Any) -> Tensor | None:
    """A tensor, of a node or found already; None if there is none."""
    tensor = call.program.tensor(value) if isinstance(value, fx.Node) else value
    if isinstance(value, fx.Node) and tensor is None:
        raise NoKernelError(f"{value.name} is not a constant")
    return None if tensor is None else tensor.detach()


def _inputs(call: Call) -> tuple[fx.Node, ...]:
    """The nodes of the input and of the state, which may be constants."""
    x, hx = call.node.args[:2]
    values = (x, *(hx if isinstance(hx, list | tuple) else (hx,)))
    return tuple(value for value in values if isinstance(value, fx.Node))
