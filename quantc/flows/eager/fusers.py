"""Fuse adjacent modules into one: the fuser methods, and the table that maps class sequences to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

import quantc.nn.intrinsic as nni
from quantc.flows.eager.faults import EagerError

Fuser = Callable[..., nn.Module]


class FusionError(EagerError, NotImplementedError, AssertionError):
    """Modules that cannot be fused."""


CONV_BN: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv1d: nni.ConvBn1d,
    nn.Conv2d: nni.ConvBn2d,
    nn.Conv3d: nni.ConvBn3d,
}
CONV_BN_RELU: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv1d: nni.ConvBnReLU1d,
    nn.Conv2d: nni.ConvBnReLU2d,
    nn.Conv3d: nni.ConvBnReLU3d,
}
CONV_RELU: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv1d: nni.ConvReLU1d,
    nn.Conv2d: nni.ConvReLU2d,
    nn.Conv3d: nni.ConvReLU3d,
}


def fuse_conv_bn(is_qat: bool, conv: nn.Module, bn: nn.Module) -> nn.Module:
    """A convolution and the batch norm behind it: for training a module of both, else a convolution that has it folded in."""
    check_norm(is_qat, conv, bn, "out_channels")
    if is_qat:
        return _class_for(CONV_BN, conv, bn)(conv, bn)
    return fuse_conv_bn_eval(conv, bn)  # type: ignore[type-var, arg-type]


def fuse_conv_bn_relu(is_qat: bool, conv: nn.Module, bn: nn.Module, relu: nn.Module) -> nn.Module:
    """A convolution, the batch norm behind it and the ReLU behind that."""
    check_norm(is_qat, conv, bn, "out_channels", relu)
    if is_qat:
        return _class_for(CONV_BN_RELU, conv, bn, relu)(conv, bn, relu)
    return _class_for(CONV_RELU, conv, bn, relu)(fuse_conv_bn_eval(conv, bn), relu)  # type: ignore[type-var, arg-type]


def fuse_linear_bn(is_qat: bool, linear: nn.Module, bn: nn.Module) -> nn.Module:
    """A linear layer and the batch norm behind it."""
    check_norm(is_qat, linear, bn, "out_features")
    return nni.LinearBn1d(linear, bn) if is_qat else fuse_linear_bn_eval(linear, bn)  # type: ignore[type-var, arg-type]


def fuse_convtranspose_bn(is_qat: bool, convt: nn.Module, bn: nn.Module) -> nn.Module:
    """A transposed convolution and the batch norm behind it; there is no form of it for training."""
    check_norm(is_qat, convt, bn, "out_channels")
    if is_qat:
        raise FusionError(
            f"{_names(convt, bn)} cannot be fused for training",
            advice="fuse them in eval mode with fuse_modules, or leave them apart",
        )
    return fuse_conv_bn_eval(convt, bn, transpose=True)  # type: ignore[type-var, arg-type]


def check_norm(is_qat: bool, layer: nn.Module, bn: Any, width: str, *others: nn.Module) -> None:
    """Refuse a layer and a batch norm that do not fit: their modes, their widths, or a norm without statistics."""
    modes = {module.training for module in (layer, bn, *others)}
    if len(modes) > 1:
        training = [type(module).__name__ for module in (layer, bn, *others) if module.training]
        raise FusionError(
            f"{_names(layer, bn, *others)} are not in one mode: {', '.join(training)} in training, the rest in eval",
            advice="call model.eval(), or model.train() for fuse_modules_qat",
        )
    if getattr(layer, width) != bn.num_features:
        raise FusionError(
            f"{_names(layer, bn)} do not fit: {getattr(layer, width)} channels and {bn.num_features}",
            advice="fuse a layer with the batch norm that follows it",
        )
    if bn.running_mean is None:
        raise FusionError(
            f"{type(bn).__name__} keeps no running statistics, so it depends on each batch and cannot be folded",
            advice="make it with track_running_stats=True, or leave the two apart",
        )
    if is_qat and not bn.affine:
        raise FusionError(
            f"{type(bn).__name__} has no weight and bias to train",
            advice="make it with affine=True, or fuse in eval mode with fuse_modules",
        )


def _names(*modules: nn.Module) -> str:
    return ", ".join(type(module).__name__ for module in modules)


def _class_for(table: Mapping[type[nn.Module], type[nn.Module]], *modules: nn.Module) -> Callable[..., nn.Module]:
    found = table.get(type(modules[0]))
    if found is None:
        raise FusionError(
            f"{_names(*modules)} cannot be fused: there is no module for it",
            advice=f"the first must be one of {', '.join(kind.__name__ for kind in table)}",
        )
    return found


def _both(kind: Callable[..., nn.Module]) -> Fuser:
    """A module that runs two after each other."""

    def fuse(is_qat: bool, first: nn.Module, second: nn.Module) -> nn.Module:
        return kind(first, second)

    return fuse


FUSER_METHODS: dict[tuple[Any, ...], Fuser] = {
    (nn.Conv1d, nn.BatchNorm1d): fuse_conv_bn,
    (nn.Conv1d, nn.BatchNorm1d, nn.ReLU): fuse_conv_bn_relu,
    (nn.Conv2d, nn.BatchNorm2d): fuse_conv_bn,
    (nn.Conv2d, nn.BatchNorm2d, nn.ReLU): fuse_conv_bn_relu,
    (nn.Conv3d, nn.BatchNorm3d): fuse_conv_bn,
    (nn.Conv3d, nn.BatchNorm3d, nn.ReLU): fuse_conv_bn_relu,
    (nn.Conv1d, nn.ReLU): _both(nni.ConvReLU1d),
    (nn.Conv2d, nn.ReLU): _both(nni.ConvReLU2d),
    (nn.Conv3d, nn.ReLU): _both(nni.ConvReLU3d),
    (nn.Linear, nn.BatchNorm1d): fuse_linear_bn,
    (nn.Linear, nn.ReLU): _both(nni.LinearReLU),
    (nn.BatchNorm2d, nn.ReLU): _both(nni.BNReLU2d),
    (nn.BatchNorm3d, nn.ReLU): _both(nni.BNReLU3d),
    (nn.ConvTranspose1d, nn.BatchNorm1d): fuse_convtranspose_bn,
    (nn.ConvTranspose2d, nn.BatchNorm2d): fuse_convtranspose_bn,
    (nn.ConvTranspose3d, nn.BatchNorm3d): fuse_convtranspose_bn,
}
"""The fuser method for each sequence of module classes."""


def get_fuser_method(op_list: Any, additional_fuser_method_mapping: Mapping[Any, Any] | None = None) -> Fuser:
    """The fuser method for a sequence of classes. Raises FusionError, listing the fusable sequences, if there is none."""
    known = {**FUSER_METHODS, **(additional_fuser_method_mapping or {})}
    kinds = tuple(op_list)
    if len(kinds) == 1 and kinds[0] in known:
        kinds = kinds[0]  # a method for one module goes by its class
    if kinds not in known:
        starts = [sequence for sequence in known if isinstance(sequence, tuple) and sequence[:1] == kinds[:1]]
        raise FusionError(
            f"{_kinds_text(kinds)} cannot be fused",
            advice=f"these can be: {'; '.join(map(_kinds_text, starts or known))}; or give additional_fuser_method_mapping",
        )
    found: Fuser = known[kinds]
    return found


def _kinds_text(kinds: Any) -> str:
    return ", ".join(getattr(kind, "__name__", str(kind)) for kind in kinds)
