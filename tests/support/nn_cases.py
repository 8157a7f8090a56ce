"""Modules of quantc.nn beside those of torch.ao, which are the oracle: a row for each, and how both are made."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.ao.nn.intrinsic as ao_intrinsic
import torch.ao.nn.intrinsic.quantized as ao_intrinsic_quantized
import torch.ao.nn.quantized as ao_quantized
from torch import Tensor, nn

from quantc.nn import QuantizedTensor, intrinsic, observers, quantize_per_tensor, quantized
from quantc.nn import qconfig as qconfigs
from quantc.nn.intrinsic import quantized as intrinsic_quantized

GRID = (0.035, 117)
"""Of what is read."""


@contextmanager
def engine(name: str) -> Iterator[None]:
    """torch's engine, which both libraries go by."""
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = name
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.backends.quantized.engine = before


@dataclass(frozen=True, eq=False)
class Case:
    """One module of each library, made of the same float module."""

    name: str
    ours: type[nn.Module]
    theirs: Any
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    engine: str = "x86"
    relu: bool = False
    """Whether the float module goes into the container of its library."""
    per_channel: bool = True

    def __str__(self) -> str:
        return f"{self.name}-{self.engine}"

    def float_pair(self) -> tuple[nn.Module, nn.Module]:
        made = self.make().eval()
        if not self.relu:
            return made, made
        return getattr(intrinsic, self.name)(made, nn.ReLU()), getattr(ao_intrinsic, self.name)(made, nn.ReLU())

    def pair(self, x: Tensor) -> tuple[Any, Any]:
        """Both, converted after they have seen `x`."""
        ours, theirs = self.float_pair()
        qconfig = qconfigs.get_default_qconfig("x86") if self.per_channel else qconfigs.default_qconfig
        for module in (ours, theirs):
            for part in (module, *module.children()):
                part.qconfig = qconfig  # type: ignore[assignment]
            observer = qconfig.activation()
            observer(module(x))
            module.activation_post_process = observer
        return self.ours.from_float(ours), self.theirs.from_float(theirs)  # type: ignore[attr-defined]


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        torch.manual_seed(seed)
        return make()

    return made


def case_of(name: str, make: Callable[[], nn.Module], shape: tuple[int, ...], **options: Any) -> Case:
    fused = options.pop("fused", False)
    ours, theirs = (intrinsic_quantized, ao_intrinsic_quantized) if fused else (quantized, ao_quantized)
    return Case(name, getattr(ours, name), getattr(theirs, name), seeded(make), shape, relu=fused, **options)


def _trained_norm(make: Callable[[], Any]) -> Callable[[], nn.Module]:
    """A norm whose statistics and parameters are not the initial ones."""

    def made() -> nn.Module:
        norm = make()
        for tensor in (*norm.parameters(), *norm.buffers()):
            if tensor.is_floating_point():
                tensor.data.uniform_(0.5, 1.5)
        return norm  # type: ignore[no-any-return]

    return made


ENGINES = ("x86", "qnnpack")
CASES: list[Case] = [
    *(
        case
        for engine_name in ENGINES
        for case in (
            case_of("Conv1d", lambda: nn.Conv1d(6, 8, 3, padding=1), (2, 6, 20), engine=engine_name),
            case_of("Conv2d", lambda: nn.Conv2d(4, 8, 3, 2, 1, groups=2), (2, 4, 13, 13), engine=engine_name),
            case_of("Linear", lambda: nn.Linear(24, 10), (5, 24), engine=engine_name),
            case_of("ConvReLU1d", lambda: nn.Conv1d(6, 8, 3, dilation=2), (2, 6, 20), fused=True, engine=engine_name),
            case_of("ConvReLU2d", lambda: nn.Conv2d(5, 7, (3, 1)), (2, 5, 9, 9), fused=True, engine=engine_name),
            case_of("LinearReLU", lambda: nn.Linear(24, 10, bias=False), (2, 3, 24), fused=True, engine=engine_name),
        )
    ),
    # torch's transposed convolutions go wrong on its engine x86, so fbgemm is the oracle of quantc's x86
    *(
        case
        for engine_name in ("fbgemm", "qnnpack")
        for case in (
            case_of(
                "ConvTranspose1d",
                lambda: nn.ConvTranspose1d(4, 6, 3, 2),
                (2, 4, 11),
                engine=engine_name,
                per_channel=False,
            ),
            case_of(
                "ConvTranspose2d",
                lambda: nn.ConvTranspose2d(4, 6, 3, 2, 1, 1),
                (2, 4, 7, 7),
                engine=engine_name,
                per_channel=False,
            ),
        )
    ),
    case_of(
        "ConvTranspose3d", lambda: nn.ConvTranspose3d(4, 6, 2, 2), (1, 4, 4, 4, 4), engine="fbgemm", per_channel=False
    ),
    case_of("Conv3d", lambda: nn.Conv3d(3, 6, 3, padding=1), (2, 3, 6, 6, 6)),
    case_of("ConvReLU3d", lambda: nn.Conv3d(3, 6, 2), (2, 3, 6, 6, 6), fused=True),
    case_of("LayerNorm", _trained_norm(lambda: nn.LayerNorm(12)), (4, 12)),
    case_of("GroupNorm", _trained_norm(lambda: nn.GroupNorm(2, 6)), (2, 6, 5, 5)),
    case_of("InstanceNorm1d", _trained_norm(lambda: nn.InstanceNorm1d(6, affine=True)), (2, 6, 9)),
    case_of("InstanceNorm2d", _trained_norm(lambda: nn.InstanceNorm2d(6, affine=True)), (2, 6, 5, 5)),
    case_of("InstanceNorm3d", _trained_norm(lambda: nn.InstanceNorm3d(6, affine=True)), (2, 6, 3, 4, 5)),
    case_of("BatchNorm2d", _trained_norm(lambda: nn.BatchNorm2d(6)), (2, 6, 5, 5)),
    case_of("BatchNorm3d", _trained_norm(lambda: nn.BatchNorm3d(6)), (2, 6, 3, 4, 5)),
    case_of("BNReLU2d", _trained_norm(lambda: nn.BatchNorm2d(6)), (2, 6, 5, 5), fused=True),
    case_of("BNReLU3d", _trained_norm(lambda: nn.BatchNorm3d(6)), (2, 6, 3, 4, 5), fused=True),
    case_of("Hardswish", nn.Hardswish, (3, 40)),
    case_of("ELU", lambda: nn.ELU(0.7), (3, 40)),
    case_of("LeakyReLU", lambda: nn.LeakyReLU(0.2), (3, 40)),
    case_of("Sigmoid", nn.Sigmoid, (3, 40)),
    case_of("Softmax", lambda: nn.Softmax(dim=1), (3, 40)),
    case_of("ReLU6", nn.ReLU6, (3, 40)),
    case_of("Dropout", lambda: nn.Dropout(0.3), (3, 40)),
]


def both(x: Tensor, grid: tuple[float, int] = GRID) -> tuple[QuantizedTensor, Tensor]:
    """Numbers quantized by each library."""
    return quantize_per_tensor(x, *grid), torch.quantize_per_tensor(x, *grid, torch.quint8)


def steps_apart(ours: Any, theirs: Any) -> int:
    """How many steps two quantized tensors are apart at most, which must be on one grid."""
    assert isinstance(ours, QuantizedTensor)
    assert ours.q_scale() == theirs.q_scale()
    assert ours.q_zero_point() == theirs.q_zero_point()
    assert ours.shape == theirs.shape
    return int((ours.int_repr().int() - theirs.int_repr().int()).abs().max())


def converted(module: Any, kind: Any, x: torch.Tensor, dtype: torch.dtype = torch.quint8) -> Any:
    """A quantized module of a float one that has seen `x`, with results of a dtype."""
    weight = observers.MinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_tensor_symmetric)
    activation = observers.MinMaxObserver.with_args(dtype=dtype)
    module.qconfig = qconfigs.QConfig(activation=activation, weight=weight)
    module.activation_post_process = module.qconfig.activation()
    module.activation_post_process(module(x))
    return kind.from_float(module)
