"""The FX graph mode flow: `prepare_fx`, `convert_fx` and what belongs to them."""

from quantc.flows.fx.backend_config import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    DTypeWithConstraints,
    MatchAllNode,
    ObservationType,
)
from quantc.flows.fx.convert import convert_fx, convert_to_reference_fx
from quantc.flows.fx.custom_config import (
    ConvertCustomConfig,
    FuseCustomConfig,
    PrepareCustomConfig,
    QuantType,
    StandaloneModuleConfigEntry,
)
from quantc.flows.fx.fuse import fuse_fx
from quantc.flows.fx.observed_module import ObservedGraphModule
from quantc.flows.fx.prepare import prepare_fx, prepare_qat_fx
from quantc.flows.fx.qconfig_mapping import (
    QConfigMapping,
    get_default_qat_qconfig_mapping,
    get_default_qconfig_mapping,
)
from quantc.flows.fx.quantized_module import QuantizedGraphModule
from quantc.nn.qconfig import (
    QConfig,
    default_dynamic_qconfig,
    default_qat_qconfig,
    default_qconfig,
    float16_dynamic_qconfig,
    float_qparams_weight_only_qconfig,
    get_default_qat_qconfig,
    get_default_qconfig,
    per_channel_dynamic_qconfig,
)

__all__ = [
    "BackendConfig",
    "BackendPatternConfig",
    "ConvertCustomConfig",
    "DTypeConfig",
    "DTypeWithConstraints",
    "FuseCustomConfig",
    "MatchAllNode",
    "ObservationType",
    "ObservedGraphModule",
    "PrepareCustomConfig",
    "QConfig",
    "QConfigMapping",
    "QuantType",
    "QuantizedGraphModule",
    "StandaloneModuleConfigEntry",
    "convert_fx",
    "convert_to_reference_fx",
    "default_dynamic_qconfig",
    "default_qat_qconfig",
    "default_qconfig",
    "float16_dynamic_qconfig",
    "float_qparams_weight_only_qconfig",
    "fuse_fx",
    "get_default_qat_qconfig",
    "get_default_qat_qconfig_mapping",
    "get_default_qconfig",
    "get_default_qconfig_mapping",
    "per_channel_dynamic_qconfig",
    "prepare_fx",
    "prepare_qat_fx",
]
