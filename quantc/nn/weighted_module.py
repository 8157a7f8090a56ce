"""Quantized modules with a weight: written once, for linear layers and convolutions of every kind."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.utils import fuse_conv_bn_weights, fuse_linear_bn_weights

from quantc.errors import SpecError
from quantc.nn.kernel_ops import Run, engine_number, target
from quantc.nn.observed_weights import WEIGHT_DTYPES, check_weight_dtype, observed_weight
from quantc.nn.products import Product, product_kernel
from quantc.nn.quantized_module import QuantizedModule
from quantc.nn.quantized_tensor import QuantizedTensor
from quantc.nn.torch_tensors import from_torch_tensor


class Weighted(QuantizedModule):
    """A product with a weight, which may end in a ReLU.

    A class is a row: `of` is the float module it is the quantized form of, whose arguments and attributes it has;
    `fused` are the modules made of that and what follows it; `relu` whether a ReLU does.
    """

    held: tuple[str, ...] = ("weight", "weight_scale", "weight_zero_point", "bias")
    settings: ClassVar[tuple[str, ...]] = ()
    """The attributes it has from the float module."""
    op: ClassVar[str] = "linear"
    of: ClassVar[type[nn.Module]] = nn.Linear
    relu: ClassVar[bool] = False
    axis: ClassVar[int] = 0
    """The axis of the weight's output channels."""

    def __init_subclass__(
        cls,
        of: type[nn.Module] | None = None,
        fused: type[nn.Module] | None = None,
        relu: bool | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init_subclass__(**kwargs)
        cls.of = of or cls.of
        cls.relu = cls.relu if relu is None else relu
        cls._FLOAT_MODULE = fused or of or cls._FLOAT_MODULE

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        kwargs = {name: value for name, value in kwargs.items() if name not in ("device", "dtype")}
        like: Any = self.of(*args, **kwargs, device="meta")  # which knows the defaults, and what is allowed
        for name in self.settings:
            setattr(self, name, getattr(like, name))
        weight = torch.zeros(like.weight.shape, dtype=torch.int8)
        self.set_weight_bias(
            QuantizedTensor(weight, 1.0, 0), None if like.bias is None else torch.zeros(like.bias.shape)
        )

    # -- weight and bias -----------------------------------------------------------------------------------------------

    def weight(self) -> QuantizedTensor:
        levels, scale, zero_point = (self.tensor(name) for name in ("weight", "weight_scale", "weight_zero_point"))
        if scale.dim():
            return QuantizedTensor(levels, scale, zero_point, self.axis)
        return QuantizedTensor(levels, float(scale), int(zero_point))

    def bias(self) -> Tensor | None:
        return self._buffers["bias"]

    def set_weight_bias(self, w: Tensor, b: Tensor | None) -> None:
        """Take another weight, quantc's or torch's, and bias."""
        if not isinstance(w, QuantizedTensor):
            w = from_torch_tensor(w)
        if w.axis_of not in (None, self.axis):
            raise SpecError(
                f"{type(self).__name__} takes scales along axis {self.axis} of its weight, and these lie along {w.axis_of}",
                advice=f"give its weight observer ch_axis={self.axis}, or one scale for the whole weight",
            )
        parts = w.parts()
        self.hold("weight", parts["data"].contiguous())
        self.hold("weight_scale", parts["scale"])
        self.hold("weight_zero_point", parts["zero_point"].to(torch.int64))
        self.hold("bias", None if b is None else b.detach().to(torch.float32).clone())

    def _weight_bias(self) -> tuple[QuantizedTensor, Tensor | None]:
        return self.weight(), self.bias()

    def optional(self) -> tuple[str, ...]:
        return () if self.bias() is not None else ("bias",)

    # -- made of others ------------------------------------------------------------------------------------------------

    @classmethod
    def from_float(cls, mod: nn.Module, use_precomputed_fake_quant: bool = False) -> Self:
        source, weight, bias, observer = cls.parts_of(mod)
        check_weight_dtype(observer, WEIGHT_DTYPES, cls.__name__)
        made = cls._like(source, bias is not None)
        made.set_weight_bias(observed_weight(weight, observer, not use_precomputed_fake_quant), bias)
        observer = getattr(mod, "activation_post_process", None)
        made.put_on_grid(observer)
        return made

    @classmethod
    def from_reference(cls, ref: nn.Module, output_scale: float, output_zero_point: int) -> Self:
        """The quantized form of a module that holds a float weight and says how it is to be quantized."""
        source: Any = ref
        made = cls._like(ref, source.bias is not None)
        made.set_weight_bias(from_torch_tensor(source.get_quantized_weight()), source.bias)
        made.scale, made.zero_point = float(output_scale), int(output_zero_point)
        return made

    @classmethod
    def parts_of(cls, mod: nn.Module) -> tuple[nn.Module, Tensor, Tensor | None, Any]:
        """Of an observed module: that which has the settings, weight and bias with a batch norm in them, and the
        observer of the weight."""
        if has_relu(mod) != cls.relu:
            raise SpecError(
                f"{cls.__name__} {'ends' if cls.relu else 'does not end'} in a ReLU, unlike {type(mod).__name__}",
                where=f"{cls.__name__}.from_float",
                advice="take the quantized module of the same name",
            )
        source: Any = mod[0] if isinstance(mod, nn.Sequential) and not hasattr(mod, "weight") else mod
        if not isinstance(source, cls.of):
            raise SpecError(
                f"{cls.__name__} is made of {cls.of.__name__}, not of {type(source).__name__}",
                where=f"{cls.__name__}.from_float",
            )
        parts: Any = source
        weight, bias = parts.weight, parts.bias
        batch_norm = getattr(source, "bn", None)
        if batch_norm is not None:
            weight, bias = fold_batch_norm(weight, bias, batch_norm, is_transposed=cls.axis == 1)
        observer = getattr(source, "weight_fake_quant", None)
        if observer is None:
            qconfig = getattr(source, "qconfig", None) or getattr(mod, "qconfig", None)
            if qconfig is None:
                raise SpecError(
                    f"{type(mod).__name__} has no qconfig, which says how its weight is quantized",
                    where=f"{cls.__name__}.from_float",
                    advice="set mod.qconfig, or prepare the model",
                )
            observer = qconfig.weight()
        return source, weight, bias, observer

    @classmethod
    @abstractmethod
    def _like(cls, source: nn.Module, has_bias: bool) -> Self:
        """An empty one of the sizes that a float module has."""

    # -- running -------------------------------------------------------------------------------------------------------

    def window(self) -> tuple[tuple[str, Any], ...]:
        """Arguments of the integer op after the bias."""
        return ()

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        x = self.ready(self.quantized_input(input))
        key = (engine_number(), x.scale_of, x.zero_point_of, x.dtype, x.dim(), self.scale, self.zero_point)
        run = self.kernels.get(key) or self.kernels.made(key, lambda: self._kernel(target(), x))
        return self.on_grid(run(x.data_of))

    def ready(self, x: QuantizedTensor) -> QuantizedTensor:
        """The input in the form that the op reads."""
        return x

    def _kernel(self, kind: str, x: QuantizedTensor) -> Run:
        product = Product(self.op, self.weight(), self.bias(), self.grid, self.out_dtype, self.relu, self.window())
        return product_kernel(kind, product, x)


def has_relu(mod: nn.Module) -> bool:
    """True if a module ends in a ReLU, by the name of its class: QAT modules have no submodule for it."""
    return "ReLU" in type(mod).__name__


def fold_batch_norm(
    weight: Tensor, bias: Tensor | None, batch_norm: Any, is_transposed: bool = False
) -> tuple[Tensor, Any]:
    """Weight and bias with the batch norm behind them."""
    norm = (batch_norm.running_mean, batch_norm.running_var, batch_norm.eps, batch_norm.weight, batch_norm.bias)
    with torch.no_grad():
        if weight.dim() == 2:
            return fuse_linear_bn_weights(weight, bias, *norm)
        return fuse_conv_bn_weights(weight, bias, *norm, is_transposed)
