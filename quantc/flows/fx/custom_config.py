"""Custom configs of prepare, convert and fuse: modules kept whole, swapped or prepared on their own.

Each config has torch's dict form; the functions take either.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any, ClassVar, NamedTuple, Self

from torch import nn

from quantc.errors import ConfigError, suggest


class CustomConfigError(ConfigError, ValueError):
    """A custom config of the wrong type, or with a key that there is not."""


class QuantType(StrEnum):
    """The kind of quantization that a custom module is for."""

    STATIC = "static"
    DYNAMIC = "dynamic"
    WEIGHT_ONLY = "weight_only"
    QAT = "qat"


Swaps = dict[QuantType, dict[type[nn.Module], type[nn.Module]]]


class StandaloneModuleConfigEntry(NamedTuple):
    """Settings of a module prepared on its own. A mapping of None is that of the whole model."""

    qconfig_mapping: Any
    example_inputs: tuple[Any, ...]
    prepare_custom_config: Any
    backend_config: Any


class _CustomConfig:
    """Base of the three configs: preserved attributes and the dict form."""

    KEYS: ClassVar[Mapping[str, str]] = {}
    """The keys of the dict form, and the attribute each is about."""

    def __init__(self) -> None:
        self.preserved_attributes: list[str] = []

    def set_preserved_attributes(self, attributes: str | Iterable[str]) -> Self:
        """The names of attributes that the result has too."""
        self.preserved_attributes = _names("preserved_attributes", attributes)
        return self

    def to_dict(self) -> dict[str, Any]:
        """The dict form; what is empty is left out."""
        found = {key: self._as_data(getattr(self, attribute)) for key, attribute in self.KEYS.items()}
        return {key: value for key, value in found.items() if value}

    @staticmethod
    def _as_data(value: Any) -> Any:
        if not isinstance(value, dict):
            return list(value)
        if all(isinstance(entry, StandaloneModuleConfigEntry) for entry in value.values()):
            return [(key, *map(_in_dict_form, entry)) for key, entry in value.items()]
        return {kind.value: dict(classes) for kind, classes in value.items()}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Self:
        """Read the dict form. A single name or class will do where several could be given."""
        made = cls()
        for key, value in given.items():
            if key not in cls.KEYS:
                raise CustomConfigError(
                    f"{cls.__name__} has no key {key!r}", advice=suggest(str(key), cls.KEYS, noun="keys")
                )
            made._read(key, value)
        return made

    def _read(self, key: str, value: Any) -> None:
        setattr(self, self.KEYS[key], _names(key, value))


class PrepareCustomConfig(_CustomConfig):
    """Custom settings of `prepare_fx` and `prepare_qat_fx`."""

    KEYS: ClassVar[Mapping[str, str]] = {
        "standalone_module_name": "standalone_module_names",
        "standalone_module_class": "standalone_module_classes",
        "float_to_observed_custom_module_class": "float_to_observed_mapping",
        "non_traceable_module_name": "non_traceable_module_names",
        "non_traceable_module_class": "non_traceable_module_classes",
        "input_quantized_idxs": "input_quantized_indexes",
        "output_quantized_idxs": "output_quantized_indexes",
        "preserved_attributes": "preserved_attributes",
    }

    def __init__(self) -> None:
        super().__init__()
        self.standalone_module_names: dict[str, StandaloneModuleConfigEntry] = {}
        self.standalone_module_classes: dict[type[nn.Module], StandaloneModuleConfigEntry] = {}
        self.float_to_observed_mapping: Swaps = {}
        self.non_traceable_module_names: list[str] = []
        self.non_traceable_module_classes: list[type[nn.Module]] = []
        self.input_quantized_indexes: list[int] = []
        self.output_quantized_indexes: list[int] = []

    def set_standalone_module_name(
        self,
        module_name: str,
        qconfig_mapping: Any,
        example_inputs: tuple[Any, ...],
        prepare_custom_config: Any = None,
        backend_config: Any = None,
    ) -> Self:
        """Prepare a module on its own: nothing is fused across its boundary."""
        entry = StandaloneModuleConfigEntry(qconfig_mapping, example_inputs, prepare_custom_config, backend_config)
        self.standalone_module_names[module_name] = entry
        return self

    def set_standalone_module_class(
        self,
        module_class: type[nn.Module],
        qconfig_mapping: Any,
        example_inputs: tuple[Any, ...],
        prepare_custom_config: Any = None,
        backend_config: Any = None,
    ) -> Self:
        """Prepare all modules of a class, each on its own."""
        entry = StandaloneModuleConfigEntry(qconfig_mapping, example_inputs, prepare_custom_config, backend_config)
        self.standalone_module_classes[module_class] = entry
        return self

    def set_float_to_observed_mapping(
        self,
        float_class: type[nn.Module],
        observed_class: type[nn.Module],
        quant_type: QuantType | str = QuantType.STATIC,
    ) -> Self:
        """Modules of a class are kept whole, and `observed_class.from_float(module)` takes their place."""
        _add_swap(self.float_to_observed_mapping, quant_type, float_class, observed_class, "from_float")
        return self

    def set_non_traceable_module_names(self, module_names: str | Iterable[str]) -> Self:
        """Modules that are kept whole, by name."""
        self.non_traceable_module_names = _names("non_traceable_module_name", module_names)
        return self

    def set_non_traceable_module_classes(self, module_classes: Any) -> Self:
        """Modules that are kept whole, by class."""
        self.non_traceable_module_classes = _names("non_traceable_module_class", module_classes)
        return self

    def set_input_quantized_indexes(self, indexes: int | Iterable[int]) -> Self:
        """The inputs that come as quantized tensors."""
        self.input_quantized_indexes = _names("input_quantized_idxs", indexes)
        return self

    def set_output_quantized_indexes(self, indexes: int | Iterable[int]) -> Self:
        """The outputs that are given as quantized tensors."""
        self.output_quantized_indexes = _names("output_quantized_idxs", indexes)
        return self

    def _read(self, key: str, value: Any) -> None:
        if key == "float_to_observed_custom_module_class":
            _read_swaps(self.float_to_observed_mapping, value, "from_float")
        elif key == "standalone_module_name":
            for name, *entry in value:
                self.set_standalone_module_name(name, *entry)
        elif key == "standalone_module_class":
            for kind, *entry in value:
                self.set_standalone_module_class(kind, *entry)
        else:
            super()._read(key, value)


class ConvertCustomConfig(_CustomConfig):
    """Custom settings of `convert_fx`."""

    KEYS: ClassVar[Mapping[str, str]] = {
        "observed_to_quantized_custom_module_class": "observed_to_quantized_mapping",
        "preserved_attributes": "preserved_attributes",
    }

    def __init__(self) -> None:
        super().__init__()
        self.observed_to_quantized_mapping: Swaps = {}

    def set_observed_to_quantized_mapping(
        self,
        observed_class: type[nn.Module],
        quantized_class: type[nn.Module],
        quant_type: QuantType | str = QuantType.STATIC,
    ) -> Self:
        """`quantized_class.from_observed(module)` takes the place of modules of a class."""
        _add_swap(self.observed_to_quantized_mapping, quant_type, observed_class, quantized_class, "from_observed")
        return self

    def _read(self, key: str, value: Any) -> None:
        if key == "observed_to_quantized_custom_module_class":
            _read_swaps(self.observed_to_quantized_mapping, value, "from_observed")
        else:
            super()._read(key, value)


class FuseCustomConfig(_CustomConfig):
    """Custom settings of `fuse_fx`."""

    KEYS: ClassVar[Mapping[str, str]] = {"preserved_attributes": "preserved_attributes"}


def _in_dict_form(part: Any) -> Any:
    """Mappings and custom configs as dicts. A backend has no form of its own here."""
    is_config = isinstance(part, _CustomConfig) or hasattr(part, "global_qconfig")
    return part.to_dict() if is_config else part


_KINDS: Mapping[str, type] = {
    "input_quantized_idxs": int,
    "output_quantized_idxs": int,
    "non_traceable_module_class": type,
}


def _names(key: str, given: Any) -> list[Any]:
    """One or several, all of the type that a key is about."""
    kind = _KINDS.get(key, str)
    found = [given] if isinstance(given, kind) or not isinstance(given, Iterable) else list(given)
    for item in found:
        if not isinstance(item, kind) or isinstance(item, bool):
            raise CustomConfigError(f"{key!r} holds {item!r}", advice=f"give a {kind.__name__}, or a list of them")
    return found


def _add_swap(swaps: Swaps, quant_type: Any, old: type, new: type, method: str) -> None:
    if not isinstance(quant_type, str):
        quant_type = str(getattr(quant_type, "name", quant_type)).lower()  # torch's kinds go by the same names
    if quant_type not in list(QuantType):
        raise CustomConfigError(
            f"unknown kind of quantization {quant_type!r}", advice=suggest(str(quant_type), QuantType, noun="kinds")
        )
    if not callable(getattr(new, method, None)):
        raise CustomConfigError(
            f"{getattr(new, '__name__', new)} has no classmethod {method}",
            where=f"it is to take the place of {getattr(old, '__name__', old)}",
            advice=f"write {method}(cls, module), which makes one of the module it is given",
        )
    swaps.setdefault(QuantType(quant_type), {})[old] = new


def _read_swaps(swaps: Swaps, given: Any, method: str) -> None:
    for quant_type, classes in given.items():
        for old, new in classes.items():
            _add_swap(swaps, quant_type, old, new, method)
