"""The PT2 export flow: `prepare_pt2e`, `convert_pt2e`, and quantizers that annotate exported graphs."""

from quantc.flows.pt2e.composable_quantizer import ComposableQuantizer
from quantc.flows.pt2e.embedding_quantizer import EmbeddingQuantizer
from quantc.flows.pt2e.export_utils import (
    allow_exported_model_train_eval,
    model_is_exported,
    move_exported_model_to_eval,
    move_exported_model_to_train,
)
from quantc.flows.pt2e.group_observers import DerivedObserverOrFakeQuantize
from quantc.flows.pt2e.numeric_debugger import (
    CUSTOM_KEY,
    FROM_NODE_KEY,
    NUMERIC_DEBUG_HANDLE_KEY,
    compare_results,
    extract_results_from_loggers,
    generate_numeric_debug_handle,
    prepare_for_propagation_comparison,
)
from quantc.flows.pt2e.qnnpack_quantizer import QNNPackQuantizer
from quantc.flows.pt2e.quantize_pt2e import convert_pt2e, convert_to_pt2e, prepare_pt2e, prepare_qat_pt2e
from quantc.flows.pt2e.quantizer import (
    DerivedQuantizationSpec,
    EdgeOrNode,
    FixedQParamsQuantizationSpec,
    OperatorConfig,
    QuantizationAnnotation,
    QuantizationConfig,
    QuantizationSpec,
    QuantizationSpecBase,
    Quantizer,
    SharedQuantizationSpec,
)
from quantc.flows.pt2e.reference import to_program
from quantc.flows.pt2e.x86_inductor_quantizer import X86InductorQuantizer, X86Quantizer
from quantc.flows.pt2e.xnnpack_quantizer import XNNPACKQuantizer, get_symmetric_quantization_config

__all__ = [
    "CUSTOM_KEY",
    "FROM_NODE_KEY",
    "NUMERIC_DEBUG_HANDLE_KEY",
    "ComposableQuantizer",
    "DerivedObserverOrFakeQuantize",
    "DerivedQuantizationSpec",
    "EdgeOrNode",
    "EmbeddingQuantizer",
    "FixedQParamsQuantizationSpec",
    "OperatorConfig",
    "QNNPackQuantizer",
    "QuantizationAnnotation",
    "QuantizationConfig",
    "QuantizationSpec",
    "QuantizationSpecBase",
    "Quantizer",
    "SharedQuantizationSpec",
    "X86InductorQuantizer",
    "X86Quantizer",
    "XNNPACKQuantizer",
    "allow_exported_model_train_eval",
    "compare_results",
    "convert_pt2e",
    "convert_to_pt2e",
    "extract_results_from_loggers",
    "generate_numeric_debug_handle",
    "get_symmetric_quantization_config",
    "model_is_exported",
    "move_exported_model_to_eval",
    "move_exported_model_to_train",
    "prepare_for_propagation_comparison",
    "prepare_pt2e",
    "prepare_qat_pt2e",
    "to_program",
]
