"""QConfigMapping: which parts of a model get which QConfig, and the mappings that kernel libraries come with."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from quantc.errors import ConfigError
from quantc.nn.fake_quantize import FixedQParamsFakeQuantize, default_weight_fake_quant
from quantc.nn.observers import (
    default_fixed_qparams_range_0to1_observer,
    default_fixed_qparams_range_neg1to1_observer,
    default_placeholder_observer,
    default_weight_observer,
)
from quantc.nn.qconfig import (
    QConfig,
    default_quint8_weight_qconfig,
    default_reuse_input_qconfig,
    get_default_qat_qconfig,
    get_default_qconfig,
)

ObjectType = Callable[..., Any] | str
"""A class of modules, a function, or the name of a method of tensors."""
KEYS = ("", "object_type", "module_name_regex", "module_name", "module_name_object_type_order")
"""The keys of the dict form, the last one wins."""


_GIVEN: Any = object()


class MappingError(ConfigError, ValueError):
    """A QConfigMapping, or a dict for one, that cannot be read."""


class QConfigMapping:
    """QConfigs for parts of a model; None leaves a part float.

    From weak to strong: `set_global`, `set_object_type`, `set_module_name_regex` (the first that matches the beginning
    of a module's name), `set_module_name` (a module and all that is in it; the innermost wins), and
    `set_module_name_object_type_order` (the n-th op of a kind in a module).
    """

    def __init__(self) -> None:
        self.global_qconfig: Any = None
        self.object_type_qconfigs: OrderedDict[ObjectType, Any] = OrderedDict()
        self.module_name_regex_qconfigs: OrderedDict[str, Any] = OrderedDict()
        self.module_name_qconfigs: OrderedDict[str, Any] = OrderedDict()
        self.module_name_object_type_order_qconfigs: OrderedDict[tuple[str, ObjectType, int], Any] = OrderedDict()

    def set_global(self, global_qconfig: Any = _GIVEN) -> QConfigMapping:
        """For everything that nothing else is said of. Called on the class itself, it makes a mapping first."""
        if global_qconfig is _GIVEN:
            return QConfigMapping().set_global(self)
        self.global_qconfig = _check_qconfig(global_qconfig)
        return self

    def set_object_type(self, object_type: ObjectType, qconfig: Any) -> QConfigMapping:
        """For a class of modules, a function, or a method by its name."""
        self.object_type_qconfigs[object_type] = _check_qconfig(qconfig)
        return self

    def set_module_name_regex(self, module_name_regex: str, qconfig: Any) -> QConfigMapping:
        """For modules whose names a regular expression matches at the beginning; the first one set wins."""
        self.module_name_regex_qconfigs[module_name_regex] = _check_qconfig(qconfig)
        return self

    def set_module_name(self, module_name: str, qconfig: Any) -> QConfigMapping:
        """For a module by name, and all that is in it."""
        self.module_name_qconfigs[module_name] = _check_qconfig(qconfig)
        return self

    def set_module_name_object_type_order(
        self, module_name: str, object_type: ObjectType, index: int, qconfig: Any
    ) -> QConfigMapping:
        """For one op: the `index`-th of a kind, counted from 0, in the module that calls it."""
        self.module_name_object_type_order_qconfigs[module_name, object_type, index] = _check_qconfig(qconfig)
        return self

    def to_dict(self) -> dict[str, Any]:
        """The dict form: the global one under "", and lists of tuples, each of which ends with its QConfig."""
        ordered = self.module_name_object_type_order_qconfigs.items()
        return {
            "": self.global_qconfig,
            "object_type": list(self.object_type_qconfigs.items()),
            "module_name_regex": list(self.module_name_regex_qconfigs.items()),
            "module_name": list(self.module_name_qconfigs.items()),
            "module_name_object_type_order": [(*key, qconfig) for key, qconfig in ordered],
        }

    @classmethod
    def from_dict(cls, qconfig_dict: dict[str, Any]) -> QConfigMapping:
        """Read the dict form; every key may be left out."""
        unknown = [key for key in qconfig_dict if key not in KEYS]
        if unknown:
            raise MappingError(
                f"a mapping of QConfigs has no key {unknown[0]!r}", advice=f"the keys are {', '.join(map(repr, KEYS))}"
            )
        made = cls().set_global(qconfig_dict.get(""))
        setters: tuple[tuple[str, int, Callable[..., Any]], ...] = (
            ("object_type", 2, made.set_object_type),
            ("module_name_regex", 2, made.set_module_name_regex),
            ("module_name", 2, made.set_module_name),
            ("module_name_object_type_order", 4, made.set_module_name_object_type_order),
        )
        for key, length, setter in setters:
            for row in _rows(key, qconfig_dict.get(key, ()), length):
                setter(*row)
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, QConfigMapping) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        lines = [f"global: {self.global_qconfig}"]
        for key, rows in self.to_dict().items():
            lines += [f"{key} {', '.join(map(str, row[:-1]))}: {row[-1]}" for row in rows or ()] if key else []
        return "QConfigMapping(\n  " + "\n  ".join(lines) + "\n)"


def _check_qconfig(qconfig: Any) -> Any:
    """Accept any object with factories of activation and weight observers, from any package."""
    if qconfig is None or (hasattr(qconfig, "activation") and hasattr(qconfig, "weight")):
        return qconfig
    raise MappingError(
        f"{qconfig!r} is no QConfig",
        advice="give QConfig(activation=..., weight=...), one by name such as default_qconfig, or None to leave it float",
    )


def _rows(key: str, rows: Iterable[Any], length: int) -> Iterable[tuple[Any, ...]]:
    for row in rows:
        if not isinstance(row, tuple | list) or len(row) != length:
            raise MappingError(f"{key!r} holds {row!r}", advice=f"give tuples of {length}, the QConfig last")
        yield tuple(row)


def mapping_of(given: Any) -> QConfigMapping:
    """The mapping a user means: one of quantc's, anything alike, or the dict form."""
    if isinstance(given, QConfigMapping):
        return given
    if isinstance(given, dict):
        return QConfigMapping.from_dict(given)
    if callable(getattr(given, "to_dict", None)) and hasattr(given, "global_qconfig"):
        return QConfigMapping.from_dict(given.to_dict())
    raise MappingError(
        f"qconfig_mapping is a {type(given).__name__}",
        advice="give a QConfigMapping, such as get_default_qconfig_mapping('x86'), or its dict form",
    )


# -- those of the kernel libraries -------------------------------------------------------------------------------------

FROM_0_TO_1: tuple[ObjectType, ...] = (
    *(nn.Hardsigmoid, functional.hardsigmoid, "hardsigmoid", "hardsigmoid_"),
    *(nn.Sigmoid, torch.sigmoid, "sigmoid", "sigmoid_", nn.Softmax),
)
FROM_MINUS_1_TO_1: tuple[ObjectType, ...] = (nn.Tanh, torch.tanh, "tanh", "tanh_")
TRANSPOSED: tuple[ObjectType, ...] = (
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d),
)
WHOLE_TRANSPOSED = ("x86", "fbgemm")
"""Backends with one scale for the whole weight of a transposed convolution."""


def get_default_qconfig_mapping(backend: str = "x86", version: int = 0) -> QConfigMapping:
    """The mapping for calibration: "x86", "fbgemm", "qnnpack" or "onednn"."""
    return _default(get_default_qconfig(backend, version), backend, trained=False)


def get_default_qat_qconfig_mapping(backend: str = "x86", version: int = 1) -> QConfigMapping:
    """The mapping for training: "x86", "fbgemm", "qnnpack" or "onednn"."""
    return _default(get_default_qat_qconfig(backend, version), backend, trained=True)


def _default(qconfig: QConfig, backend: str, *, trained: bool) -> QConfigMapping:
    whole = default_weight_fake_quant if trained else default_weight_observer
    transposed = QConfig(qconfig.activation, whole) if backend in WHOLE_TRANSPOSED else qconfig
    mapping = QConfigMapping().set_global(qconfig).set_object_type("reshape", default_reuse_input_qconfig)
    for kind in TRANSPOSED:
        mapping.set_object_type(kind, transposed)
    for kind in (functional.layer_norm, nn.LayerNorm):
        mapping.set_object_type(kind, QConfig(qconfig.activation, default_placeholder_observer))
    mapping.set_object_type(nn.PReLU, default_quint8_weight_qconfig)
    for kinds, observer in (
        (FROM_0_TO_1, default_fixed_qparams_range_0to1_observer),
        (FROM_MINUS_1_TO_1, default_fixed_qparams_range_neg1to1_observer),
    ):
        activation = FixedQParamsFakeQuantize.with_args(observer=observer) if trained else observer
        for kind in kinds:
            mapping.set_object_type(kind, QConfig(activation, whole))
    return mapping
