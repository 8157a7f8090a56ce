"""Fake quantizers: one module per group of the plan, shared by all sites of the group.

Each yields the values that the converted program will compute with, and provides the final scale and zero point.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from quantc.errors import DataError, TrainingError
from quantc.observe.fit import Fit
from quantc.observe.observation_registry import start
from quantc.qat.freezing import Freezable
from quantc.qat.straight_through import (
    fake_quantize,
    gradient_factor,
    learned_fake_quantize,
    passed_through,
)
from quantc.qdq.choose_qparams import CHOOSE
from quantc.qdq.registration import decomposed_ops
from quantc.spec.formats import PerToken, Role, Scheme
from quantc.spec.granularity import extremes
from quantc.spec.numerics import QParams, allowed_scale, middle, qparams_of_sound_range, scale_product
from quantc.spec.spec import DEFAULT_OBSERVE, FITTED_BITS, FLOAT32_DIGITS, QuantSpec

outside_graphs: Any = _disable_dynamo
"""Decorator for functions that read elements: compiled programs call them uncompiled. Unlike `torch.compiler.disable` it
imports `torch._dynamo` only on the first call."""


class FakeQuantizer(Freezable):
    """Rounds its input to the grid of its group, in training and in eval mode alike."""

    def __init__(self, group: str, spec: QuantSpec, where: str = "") -> None:
        super().__init__()
        self.group = group
        self.spec = spec
        self.where = where
        self.current: QParams | None = None
        """The qparams of the last tensor, if another group derives its own from them."""
        self.is_parent = False

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() == 0:
            return x
        qparams = self.find(x)
        if self.is_parent:
            self.current = qparams
        return fake_quantize(x, qparams, self.spec, clips=self.clips)

    @property
    def clips(self) -> bool:
        """True if inputs can lie outside the range."""
        return True

    @abstractmethod
    def find(self, x: Tensor) -> QParams:
        """Scale and zero point for a tensor."""

    @property
    def trained_by_data(self) -> bool:
        """True if it has no scale before it has seen data in training."""
        return isinstance(self, FollowedRange | LearnedScale)

    def trained(self) -> QParams | None:
        """Trained qparams; None if they are read from the tensors themselves. TrainingError if nothing was trained."""
        return None

    def why_unfit(self) -> str | None:
        """Reason why the trained qparams cannot be used; None if they can."""
        return None

    def extra_repr(self) -> str:
        return f"{self.group}, {self.spec}{', frozen' if self.frozen else ''}"


class HandedOn(nn.Module):
    """Placeholder for rounding a tensor that is already rounded, which changes no value: the identity in training.

    In eval mode it rounds all the same: the result has the memory format of the converted program, and the summation
    order of convs and matmuls depends on it.
    """

    def __init__(self, fake: FakeQuantizer) -> None:
        super().__init__()
        self.__dict__["fake"] = fake  # not as a child: it has a name of its own

    def forward(self, x: Tensor) -> Tensor:
        fake: FakeQuantizer = self.__dict__["fake"]
        return x if self.training else fake(x)


class OwnRange(FakeQuantizer):
    """For weights: the current range of the tensor, at each step."""

    @property
    def clips(self) -> bool:
        spec = self.spec
        is_even = spec.scheme is Scheme.SYMMETRIC and spec.qmin == -spec.qmax
        return not (is_even and spec.observe == DEFAULT_OBSERVE and spec.scale_bits == FLOAT32_DIGITS)

    def find(self, x: Tensor) -> QParams:
        weight = x.detach()
        if self.spec.observe != DEFAULT_OBSERVE:
            observed: QParams = _observe_weight(weight, self.spec, self.where)
            return observed
        return qparams_of_sound_range(*extremes(weight.float(), self.spec.granularity), self.spec)


@outside_graphs  # type: ignore[untyped-decorator]
def _observe_weight(weight: Tensor, spec: QuantSpec, where: str) -> QParams:
    observation = start(spec)
    observation.update(weight, where=where)
    return observation.qparams(spec, where=where)


class FollowedRange(FakeQuantizer):
    """For activations: the range seen in training, or its moving average."""

    low: Tensor
    high: Tensor
    batches: Tensor

    def __init__(self, group: str, spec: QuantSpec, where: str, shape: torch.Size, rate: float | None) -> None:
        super().__init__(group, spec, where)
        self.rate = rate
        """Step of the range's moving average; None if the range only grows."""
        self.register_buffer("low", torch.zeros(shape))
        self.register_buffer("high", torch.zeros(shape))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def find(self, x: Tensor) -> QParams:
        if self.learns:
            self._observe(x.detach())
        elif not torch.compiler.is_compiling():
            _refuse(self)
        return qparams_of_sound_range(self.low, self.high, self.spec)

    @torch.no_grad()
    def _observe(self, x: Tensor) -> None:
        low, high = extremes(x.float(), self.spec.granularity, where=self.where)
        if not torch.compiler.is_compiling() and not bool(torch.isfinite(high - low).all()):
            raise DataError(
                f"{int((~torch.isfinite(x)).sum())} of {x.numel()} values are NaN or infinite, in training",
                where=f"{self.group} ({self.where})",
                advice="lower the learning rate, clip the gradients, or look for the op that makes them; then go on from "
                "the last state that was saved",
            )
        if self.rate is None:
            next_low, next_high = torch.minimum(self.low, low), torch.maximum(self.high, high)
        else:
            next_low = self.low + self.rate * (low - self.low)
            next_high = self.high + self.rate * (high - self.high)
        first = self.batches == 0
        self.low.copy_(torch.where(first, low, next_low))
        self.high.copy_(torch.where(first, high, next_high))
        self.batches.add_(1)

    def trained(self) -> QParams:
        _refuse(self)
        return qparams_of_sound_range(self.low, self.high, self.spec)

    def why_unfit(self) -> str | None:
        if not int(self.batches):
            return "no batch has gone through it in training mode"
        if not bool(torch.isfinite(self.high - self.low).all()):
            return f"its range is {self.low.tolist()}..{self.high.tolist()}"
        return None


def _refuse(fake: FakeQuantizer) -> None:
    why = fake.why_unfit()
    if why is not None:
        raise TrainingError(
            f"there is no scale for {fake.group}: {why}",
            where=fake.where or fake.group,
            advice="call prepared.train() and train on at least one batch that reaches it, without NaN",
        )


class GivenScale(FakeQuantizer):
    """Fixed scale and zero point."""

    scale: Tensor
    zero_point: Tensor

    def __init__(self, group: str, spec: QuantSpec, where: str, qparams: QParams) -> None:
        super().__init__(group, spec, where)
        self.register_buffer("scale", qparams.scale, persistent=False)
        self.register_buffer("zero_point", qparams.zero_point, persistent=False)

    def find(self, x: Tensor) -> QParams:
        return QParams(self.scale, self.zero_point)

    def trained(self) -> QParams:
        return QParams(self.scale, self.zero_point)


class RunTimeScale(FakeQuantizer):
    """Dynamic quantization: each tensor gets its own scale, by the ops that the converted program will run."""

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() == 0:
            return x
        return passed_through(x, self._round(x.detach().float()).to(x.dtype))

    def _round(self, x: Tensor) -> Tensor:
        spec, ops = self.spec, decomposed_ops()
        ends = (spec.qmin, spec.qmax, spec.dtype.storage)
        per_token = isinstance(spec.granularity, PerToken)
        if not per_token and spec.scheme is Scheme.AFFINE:
            chosen = ops.choose_qparams.tensor(x, spec.qmin, spec.qmax, spec.eps, spec.dtype.storage)
        else:
            zero_point = middle(spec) if spec.scheme is Scheme.SYMMETRIC else None
            chosen = CHOOSE(x, per_token, zero_point, spec.qmin, spec.qmax, spec.eps)
        rounded: Tensor
        if per_token:
            levels = ops.quantize_per_token(x, *chosen, *ends)
            rounded = ops.dequantize_per_token(levels, *chosen, *ends, torch.float32)
        else:
            levels = ops.quantize_per_tensor.tensor(x, *chosen, *ends)
            rounded = ops.dequantize_per_tensor.tensor(levels, *chosen, *ends)
        return rounded

    def find(self, x: Tensor) -> QParams:
        raise TrainingError(f"{self.group} has no scale before it runs", advice="leave its bias float")


class DerivedScale(FakeQuantizer):
    """For biases: the product of input scale and weight scale."""

    def __init__(self, group: str, spec: QuantSpec, where: str, parents: tuple[FakeQuantizer, ...]) -> None:
        super().__init__(group, spec, where)
        self.__dict__["parents"] = parents  # not as children: they have names of their own
        for parent in parents:
            parent.is_parent = True

    def find(self, x: Tensor) -> QParams:
        parents: tuple[FakeQuantizer, ...] = self.__dict__["parents"]
        known = [parent.current for parent in parents if parent.current is not None]
        if len(known) < len(parents):
            raise TrainingError(f"{self.group} is read before input and weight are", where=self.where)
        return scale_product(*known)


class LearnedScale(FakeQuantizer):
    """Learned scales (LSQ), and zero points too (LSQ+). They are initialized from the first tensor seen in training: at
    the least squared error for weights, at the range for activations.
    """

    started: Tensor

    def __init__(self, group: str, spec: QuantSpec, where: str, shape: torch.Size, *, learns_zero_point: bool) -> None:
        super().__init__(group, spec, where)
        self.scale = nn.Parameter(torch.ones(shape))
        self.zero_point = nn.Parameter(
            torch.full(shape, float(middle(spec))), requires_grad=learns_zero_point and spec.scheme is Scheme.AFFINE
        )
        self.register_buffer("started", torch.zeros((), dtype=torch.bool))
        self.is_started = False
        """`started` as a Python bool, to avoid reading a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() == 0:
            return x
        self._start(x)
        if self.is_parent:
            self.current = self.find(x)
        sharing = x.numel() // max(self.scale.numel(), 1)
        if self.spec.role is Role.ACT and x.dim() > 1:
            sharing //= max(x.shape[0], 1)
        factor = gradient_factor(sharing, self.spec)
        scale, zero_point = self._sound()
        if self.frozen:
            scale, zero_point = scale.detach(), zero_point.detach()
        return learned_fake_quantize(x, scale, zero_point, self.spec, factor)

    def _sound(self) -> tuple[Tensor, Tensor]:
        """Scales above the smallest allowed, with the bits that the spec gives them, and zero points within the range,
        whatever the optimizer has done."""
        smallest = torch.full((), self.spec.eps, dtype=torch.float32, device=self.scale.device)
        scale = torch.maximum(self.scale.abs(), smallest)
        if self.spec.scale_bits < FLOAT32_DIGITS:
            scale = passed_through(scale, allowed_scale(scale.detach(), self.spec))
        return scale, self.zero_point.clamp(self.spec.qmin, self.spec.qmax)

    def _start(self, x: Tensor) -> None:
        if self.is_started:
            return
        if not self.learns:
            _refuse(self)
        _first_scale(self, x.detach().float())
        self.is_started = True

    def find(self, x: Tensor) -> QParams:
        scale, zero_point = self._sound()
        return QParams(scale.detach(), torch.round(zero_point.detach()).to(torch.int64))

    def trained(self) -> QParams:
        _refuse(self)
        return self.find(self.scale)

    def why_unfit(self) -> str | None:
        if not bool(self.started):
            return "no batch has gone through it in training mode"
        if not bool(torch.isfinite(self.scale).all() and torch.isfinite(self.zero_point).all()):
            return "its learned scale is NaN or infinite"
        return None

    def set_extra_state(self, state: Tensor) -> None:
        super().set_extra_state(state)
        self.is_started = bool(self.started)


@outside_graphs  # type: ignore[untyped-decorator]
@torch.no_grad()
def _first_scale(fake: LearnedScale, x: Tensor) -> None:
    if bool(fake.started):  # initialized by a copy of another's tensors, as by torch.optim.swa_utils.AveragedModel
        return
    spec = fake.spec.but(observe=None)
    if spec.role is Role.WEIGHT and spec.dtype.bits <= FITTED_BITS:
        found = Fit.empty(spec.granularity, {})
        found.update(x, where=fake.where)
        qparams = found.qparams(spec, where=fake.where)
    else:
        observation = start(spec)
        observation.update(x, where=fake.where)
        qparams = observation.qparams(spec, where=fake.where)
    fake.scale.copy_(qparams.scale)
    fake.zero_point.copy_(qparams.zero_point)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        # each process sees other data first, and parameters must be the same in all
        for tensor in (fake.scale, fake.zero_point):
            torch.distributed.broadcast(tensor.data, 0)
    fake.started.fill_(True)
