"""BackendConfig and what it is made of: which patterns a backend runs, and in which formats.

It is another way to write down a rule table (`quantc.flows.fx.backend_config_rules`); torch's own configs are read in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Self

import torch

from quantc.errors import suggest
from quantc.flows.fx.custom_config import CustomConfigError


class ObservationType(Enum):
    """The ways to observe the result of a pattern."""

    OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT = 0
    """An observer of its own."""
    OUTPUT_SHARE_OBSERVER_WITH_INPUT = 1
    """The scale of the input."""
    INPUT_OUTPUT_NOT_OBSERVED = 2
    """Neither is observed."""


class MatchAllNode:
    """Stands for any operand in a nested pattern."""


@dataclass(frozen=True)
class DTypeWithConstraints:
    """A dtype, and what an observer has to keep to for it: where it does not, its QConfig is passed over."""

    dtype: torch.dtype | None = None
    quant_min_lower_bound: float | None = None
    quant_max_upper_bound: float | None = None
    scale_min_lower_bound: float | None = None
    """The smallest scale (`eps`) that an observer may have."""
    scale_max_upper_bound: float | None = None
    """Written down, and not checked: observers have no largest scale."""
    scale_exact_match: float | None = None
    zero_point_exact_match: int | None = None


DType = torch.dtype | DTypeWithConstraints | None
DTYPES = ("input_dtype", "output_dtype", "weight_dtype")


class DTypeConfig:
    """The formats of a pattern's input, output, weight and bias."""

    def __init__(
        self,
        input_dtype: DType = None,
        output_dtype: DType = None,
        weight_dtype: DType = None,
        bias_dtype: torch.dtype | None = None,
        is_dynamic: bool | None = None,
    ) -> None:
        self.input_dtype_with_constraints = _as_constraints("input_dtype", input_dtype)
        self.output_dtype_with_constraints = _as_constraints("output_dtype", output_dtype)
        self.weight_dtype_with_constraints = _as_constraints("weight_dtype", weight_dtype)
        self.bias_dtype = bias_dtype
        self.is_dynamic = is_dynamic

    @property
    def input_dtype(self) -> torch.dtype | None:
        return self.input_dtype_with_constraints.dtype

    @property
    def output_dtype(self) -> torch.dtype | None:
        return self.output_dtype_with_constraints.dtype

    @property
    def weight_dtype(self) -> torch.dtype | None:
        return self.weight_dtype_with_constraints.dtype

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Self:
        """Read the dict form; every key may be left out."""
        return cls(**_check_keys(cls, given, (*DTYPES, "bias_dtype", "is_dynamic")))

    def to_dict(self) -> dict[str, Any]:
        """The dict form; what is not said is left out."""
        found: dict[str, Any] = {
            key: getattr(self, f"{key}_with_constraints") for key in DTYPES if getattr(self, key) is not None
        }
        rest = {"bias_dtype": self.bias_dtype, "is_dynamic": self.is_dynamic}
        return found | {key: value for key, value in rest.items() if value is not None}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DTypeConfig) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"DTypeConfig({', '.join(f'{key}={value}' for key, value in self.to_dict().items())})"


def _as_constraints(key: str, given: Any) -> DTypeWithConstraints:
    if given is None or isinstance(given, torch.dtype):
        return DTypeWithConstraints(given)
    if isinstance(given, DTypeWithConstraints):
        return given
    raise CustomConfigError(f"{key} is {given!r}", advice="give a torch.dtype, or a DTypeWithConstraints")


SETTERS = {
    "pattern": "set_pattern",
    "observation_type": "set_observation_type",
    "dtype_configs": "set_dtype_configs",
    "root_module": "set_root_module",
    "qat_module": "set_qat_module",
    "reference_quantized_module": "set_reference_quantized_module",
    "fused_module": "set_fused_module",
    "fuser_method": "set_fuser_method",
    "root_node_getter": "_set_root_node_getter",
    "extra_inputs_getter": "_set_extra_inputs_getter",
    "num_tensor_args_to_observation_type": "_set_num_tensor_args_to_observation_type",
    "input_type_to_index": "_set_input_type_to_index",
    "pattern_complex_format": "_set_pattern_complex_format",
}
"""The keys of the dict form of a pattern's config, and what reads each."""


class BackendPatternConfig:
    """Quantization of one pattern: a module class, a function, a method name, or a tuple of these in call order.
    The replacement classes that torch asks for are recorded and unused: a fused, trained or quantized op is a form of the
    same program."""

    def __init__(self, pattern: Any = None) -> None:
        self.pattern = pattern
        self.observation_type = ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT
        self.dtype_configs: list[DTypeConfig] = []
        self.root_module: type | None = None
        self.qat_module: type | None = None
        self.reference_quantized_module: type | None = None
        self.fused_module: type | None = None
        self.fuser_method: Callable[..., Any] | None = None
        self._root_node_getter: Callable[..., Any] | None = None
        self._extra_inputs_getter: Callable[..., Any] | None = None
        self._num_tensor_args_to_observation_type: dict[int, ObservationType] = {}
        self._input_type_to_index: dict[str, int] = {}
        self._pattern_complex_format: Any = None

    def set_pattern(self, pattern: Any) -> Self:
        """The pattern, in the order of the calls: `(nn.Conv2d, nn.ReLU)`."""
        return self._one_of("pattern", pattern)

    def _set_pattern_complex_format(self, pattern: Any) -> Self:
        """The pattern from its result inwards, with all operands: `(nn.ReLU, (torch.add, nn.Conv2d, MatchAllNode))`."""
        return self._one_of("_pattern_complex_format", pattern)

    def _one_of(self, name: str, pattern: Any) -> Self:
        setattr(self, name, pattern)
        if self.pattern is not None and self._pattern_complex_format is not None:
            raise CustomConfigError("a config has two patterns", where=repr(pattern), advice="set one of the two forms")
        return self

    def set_observation_type(self, observation_type: ObservationType) -> Self:
        """Choose between an observer of the result's own, the input's scale, and none."""
        if getattr(observation_type, "name", None) not in ObservationType.__members__:
            advice = suggest(str(observation_type), ObservationType.__members__, noun="observation types")
            raise CustomConfigError(f"unknown observation type {observation_type!r}", advice=advice)
        self.observation_type = ObservationType[observation_type.name]
        return self

    def add_dtype_config(self, dtype_config: DTypeConfig) -> Self:
        """Add formats that the pattern supports."""
        return self.set_dtype_configs([*self.dtype_configs, dtype_config])

    def set_dtype_configs(self, dtype_configs: Iterable[DTypeConfig | Mapping[str, Any]]) -> Self:
        """Set the formats that the pattern supports."""
        self.dtype_configs = [
            DTypeConfig.from_dict(each)
            if isinstance(each, Mapping)
            else _check_kind("dtype_configs", DTypeConfig, each)
            for each in dtype_configs
        ]
        return self

    def set_root_module(self, root_module: type | None) -> Self:
        self.root_module = root_module
        return self

    def set_qat_module(self, qat_module: type | None) -> Self:
        self.qat_module = qat_module
        return self

    def set_reference_quantized_module(self, reference_quantized_module: type | None) -> Self:
        self.reference_quantized_module = reference_quantized_module
        return self

    def set_fused_module(self, fused_module: type | None) -> Self:
        self.fused_module = fused_module
        return self

    def set_fuser_method(self, fuser_method: Callable[..., Any] | None) -> Self:
        self.fuser_method = fuser_method
        return self

    def _set_root_node_getter(self, root_node_getter: Callable[..., Any] | None) -> Self:
        self._root_node_getter = root_node_getter
        return self

    def _set_extra_inputs_getter(self, extra_inputs_getter: Callable[..., Any] | None) -> Self:
        self._extra_inputs_getter = extra_inputs_getter
        return self

    def _set_num_tensor_args_to_observation_type(self, given: Mapping[int, ObservationType]) -> Self:
        self._num_tensor_args_to_observation_type = dict(given)
        return self

    def _set_input_type_to_index(self, input_type_to_index: Mapping[str, int]) -> Self:
        self._input_type_to_index = dict(input_type_to_index)
        return self

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Self:
        """Read the dict form; every key may be left out."""
        made = cls()
        for key, value in _check_keys(cls, given, SETTERS).items():
            getattr(made, SETTERS[key])(value)
        return made

    def to_dict(self) -> dict[str, Any]:
        """The dict form; what is not said is left out."""
        found: dict[str, Any] = {
            "observation_type": self.observation_type,
            "dtype_configs": [each.to_dict() for each in self.dtype_configs],
        }
        for key, setter in SETTERS.items():
            value = getattr(self, f"_{key}" if setter.startswith("_") else key)
            if key not in found and value is not None and value != {}:
                found[key] = value
        return found

    def __repr__(self) -> str:
        return f"BackendPatternConfig({', '.join(f'{key}={value}' for key, value in self.to_dict().items())})"


class BackendConfig:
    """The patterns that a backend runs. A pattern that is set again replaces the former."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self._by_pattern: dict[Any, BackendPatternConfig] = {}

    def set_name(self, name: str) -> Self:
        self.name = name
        return self

    def set_backend_pattern_config(self, config: BackendPatternConfig) -> Self:
        """Set the config of one pattern."""
        _check_kind("configs", BackendPatternConfig, config)
        self._by_pattern[config.pattern, config._pattern_complex_format] = config
        return self

    def set_backend_pattern_configs(self, configs: Iterable[BackendPatternConfig]) -> Self:
        """Set the configs of several patterns."""
        for config in configs:
            self.set_backend_pattern_config(config)
        return self

    @property
    def configs(self) -> list[BackendPatternConfig]:
        """The config of each pattern."""
        return list(self._by_pattern.values())

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Self:
        """Read the dict form: a name, and configs as objects or dicts."""
        known = _check_keys(cls, given, ("name", "configs"))
        configs = known.get("configs", ())
        return cls(known.get("name", "")).set_backend_pattern_configs(
            BackendPatternConfig.from_dict(each) if isinstance(each, Mapping) else each for each in configs
        )

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "configs": [config.to_dict() for config in self.configs]}

    def __repr__(self) -> str:
        return f"BackendConfig({self.name!r}, {len(self.configs)} patterns)"


def _check_kind(key: str, kind: type[Any], given: Any) -> Any:
    """An object of this module, or one of the same name from another."""
    if isinstance(given, kind) or type(given).__name__ == kind.__name__:
        return given
    raise CustomConfigError(f"{key} holds {given!r}", advice=f"give {kind.__name__} objects, or their dict form")


def _check_keys(kind: type[Any], given: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise CustomConfigError(f"{kind.__name__}.from_dict was given {given!r}", advice="give the dict form")
    for key in given:
        if key not in keys:
            raise CustomConfigError(f"{kind.__name__} has no key {key!r}", advice=suggest(str(key), keys, noun="keys"))
    return dict(given)
