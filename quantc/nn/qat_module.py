"""Modules for quantization aware training: float modules whose weight goes through a fake quantizer.

Written once, to be put before a float module: `class Conv2d(Trained, nn.Conv2d)` is one more.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional, init

from quantc.errors import SpecError
from quantc.nn.weighted_module import fold_batch_norm
from quantc.qat.schedule import is_norm_part

CONV = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "bias", "padding_mode")
LINEAR = ("in_features", "out_features", "bias")
TABLE = ("num_embeddings", "embedding_dim", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
BAG = (
    *TABLE[:2],
    "max_norm",
    "norm_type",
    "scale_grad_by_freq",
    "mode",
    "sparse",
    "include_last_offset",
    "padding_idx",
)
SETTINGS: dict[type[nn.Module], tuple[str, ...]] = {
    nn.Conv1d: CONV,
    nn.Conv2d: CONV,
    nn.Conv3d: CONV,
    nn.Linear: LINEAR,
    nn.Embedding: TABLE,
    nn.EmbeddingBag: BAG,
}
"""Constructor arguments of each float module, in order: the attributes of the same names."""


class Trained(nn.Module):
    """A float module whose weight is fake-quantized; it may end in a ReLU.

    A class is a row: the float module it is put before, `fused` if it is made of a sequence, `relu` if that ends in one.
    """

    _FLOAT_MODULE: ClassVar[Any] = None
    plain: ClassVar[type[nn.Module]]
    """The float module."""
    relu: ClassVar[bool] = False
    extra: ClassVar[tuple[str, ...]] = ("qconfig",)
    """Constructor arguments beyond the float module's."""

    weight: Any
    bias: Any
    _modules: Any

    def __init_subclass__(cls, fused: type[nn.Module] | None = None, relu: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.plain = next((base for base in cls.__mro__ if base in SETTINGS), nn.Module)
        cls._FLOAT_MODULE, cls.relu = fused or cls.plain, relu

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        names = (*SETTINGS[self.plain], *self.extra)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        own = {name: given.pop(name) for name in self.extra if name in given}
        super().__init__(**given)
        self.qconfig = own.get("qconfig")
        if not self.qconfig:
            raise SpecError(
                f"{type(self).__name__} has no qconfig, which says how its weight is fake-quantized",
                advice="give qconfig=get_default_qat_qconfig(), or prepare the model",
            )
        self.weight_fake_quant: Any = self.qconfig.weight()
        self.set_up(**own)

    def set_up(self, **own: Any) -> None:
        """Hook for a subclass to set up its own state."""

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: A002 - torch's name
        made = self.product(input, self.weight_fake_quant(self.weight), self.bias, *args, **kwargs)
        return functional.relu(made) if self.relu else made

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The float module's computation, with another weight and bias."""
        if self.plain is nn.Linear:
            return functional.linear(x, weight, bias)
        made: Tensor = self._conv_forward(x, weight, bias)  # type: ignore[operator]
        return made

    # -- from float, and back ------------------------------------------------------------------------------------------

    @classmethod
    def from_float(cls, mod: Any, use_precomputed_fake_quant: bool = False) -> Self:
        """The trained form of a float module, which shares its parameters."""
        if type(mod).__name__ != cls._FLOAT_MODULE.__name__:
            raise SpecError(
                f"{cls.__name__} is made of {cls._FLOAT_MODULE.__name__}, not of {type(mod).__name__}",
                where=f"{cls.__name__}.from_float",
            )
        source = mod[0] if isinstance(mod, nn.Sequential) else mod
        qconfig = getattr(mod, "qconfig", None) or getattr(source, "qconfig", None)
        made = cls(**_settings(cls.plain, source), **cls.more(mod), qconfig=qconfig)
        made.share(mod, source)
        return made

    @classmethod
    def more(cls, mod: Any) -> dict[str, Any]:
        return {}

    def share(self, mod: Any, source: Any) -> None:
        self.weight = source.weight
        if hasattr(source, "bias"):
            self.bias = source.bias

    def to_float(self) -> nn.Module:
        """The float module, or sequence, with the trained parameters."""
        weight, bias = self.learned()
        made: Any = self.plain(
            **{**_settings(self.plain, self), **({"bias": bias is not None} if self.has_bias else {})}
        )
        made.weight = nn.Parameter(weight.detach().clone())
        if bias is not None:
            made.bias = nn.Parameter(bias.detach().clone())
        whole = self.in_sequence(made)
        return whole.train(self.training)

    def in_sequence(self, made: nn.Module) -> nn.Module:
        return self._FLOAT_MODULE(made, nn.ReLU()) if self.relu else made

    @property
    def has_bias(self) -> bool:
        return "bias" in SETTINGS[self.plain]

    def learned(self) -> tuple[Tensor, Tensor | None]:
        return self.weight, self.bias if self.has_bias else None


def _settings(plain: type[nn.Module], source: Any) -> dict[str, Any]:
    found = {name: getattr(source, name) for name in SETTINGS[plain]}
    return {name: value is not None if name == "bias" else value for name, value in found.items()}


class TrainedNorm(Trained):
    """The same with a batch norm behind it, folded into the weight by its running statistics.

    The weight is scaled by the norm's factor, fake-quantized, and the result is scaled back; then the norm follows as it is. So
    the rounded weight is the converted one, and batch statistics are learned as usual.
    """

    extra: ClassVar[tuple[str, ...]] = ("eps", "momentum", "freeze_bn", "qconfig")
    norm: ClassVar[type[nn.Module]] = nn.BatchNorm2d
    without_norm: ClassVar[type[nn.Module] | None] = None
    """The sequence it becomes when the norm is folded, if it ends in a ReLU."""

    def __init_subclass__(
        cls, norm: type[nn.Module] | None = None, without_norm: type[nn.Module] | None = None, **kwargs: Any
    ) -> None:
        super().__init_subclass__(**kwargs)
        cls.norm, cls.without_norm = norm or cls.norm, without_norm

    def set_up(self, eps: float = 1e-5, momentum: float = 0.1, freeze_bn: bool = False, **_: Any) -> None:
        norm: Any = self.norm(len(self.weight), eps, momentum)
        init.uniform_(norm.weight)
        self.bn = norm
        self.freeze_bn = False
        if freeze_bn:
            self.freeze_bn_stats()

    def reset_running_stats(self) -> None:
        self.bn.reset_running_stats()

    def update_bn_stats(self) -> Self:
        """Count running statistics."""
        self.freeze_bn, self.bn.training = False, True
        return self

    def freeze_bn_stats(self) -> Self:
        """Use running statistics as they are, in training too."""
        self.freeze_bn, self.bn.training = True, False
        return self

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: A002
        factor = self.bn.weight / torch.sqrt(self.bn.running_var + self.bn.eps)
        behind = [1] * (self.weight.dim() - 1)
        weight = self.weight_fake_quant(self.weight * factor.reshape(-1, *behind))
        # a channel that the norm switches off has nothing to round, and could not be divided again: it learns in float
        is_off = factor == 0
        weight = torch.where(is_off.reshape(-1, *behind), self.weight, weight)
        factor = torch.where(is_off, torch.ones_like(factor), factor)
        channels = [1, -1, *behind[1:]]
        # a bias of zeros and not none: the sums then are those of the module that is converted
        made = self.product(input, weight, weight.new_zeros(len(weight))) / factor.reshape(channels)
        if self.bias is not None:
            made = made + self.bias.reshape(channels)
        normed: Tensor = self.bn(made)
        return functional.relu(normed) if self.relu else normed

    def train(self, mode: bool = True) -> Self:
        """As usual; but a norm that is frozen stays so."""
        self.training = mode
        if not self.freeze_bn:
            for module in self.children():
                module.train(mode)
        return self

    @classmethod
    def more(cls, mod: Any) -> dict[str, Any]:
        return {"eps": mod[1].eps, "momentum": mod[1].momentum}

    def share(self, mod: Any, source: Any) -> None:
        super().share(mod, source)
        for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
            setattr(self.bn, name, getattr(mod[1], name))

    def learned(self) -> tuple[Tensor, Tensor | None]:
        return fold_batch_norm(self.weight, self.bias, self.bn)

    def in_sequence(self, made: nn.Module) -> nn.Module:
        return made if self.without_norm is None else self.without_norm(made, nn.ReLU())


def update_bn_stats(mod: nn.Module) -> None:
    """For `model.apply`: count running statistics. Models of the FX flow have norms as parts of a program."""
    if isinstance(mod, TrainedNorm):
        mod.update_bn_stats()
    elif is_norm_part(mod):
        mod.frozen = False


def freeze_bn_stats(mod: nn.Module) -> None:
    """For `model.apply`: use running statistics as they are."""
    if isinstance(mod, TrainedNorm):
        mod.freeze_bn_stats()
    elif is_norm_part(mod):
        mod.frozen = True
