"""The eager flow: stubs, observers on modules, and quantized modules in the place of float ones.

The names are those of `torch.quantization` (now `torch.ao.quantization`), over quantc's observers, numbers and kernels. What
passes in silence there is an error or a warning here, with the module it is about.
"""

from quantc.flows.eager.convert import convert, swap_module
from quantc.flows.eager.faults import (
    CHECKS,
    AlreadyDoneError,
    EagerError,
    EagerModeError,
    EagerWarning,
    LostHookWarning,
    MissingStubError,
    NoEffectError,
    NothingQuantizedError,
    NotObservedError,
    ReusedLayerError,
    UnfusedWarning,
)
from quantc.flows.eager.fuse_modules import _fuse_modules, fuse_known_modules, fuse_modules, fuse_modules_qat
from quantc.flows.eager.fusers import (
    FusionError,
    fuse_conv_bn,
    fuse_conv_bn_relu,
    fuse_convtranspose_bn,
    fuse_linear_bn,
    get_fuser_method,
)
from quantc.flows.eager.mappings import (
    get_default_compare_output_module_list,
    get_default_custom_config_dict,
    get_default_dynamic_quant_module_mappings,
    get_default_float_to_quantized_operator_mappings,
    get_default_qat_module_mappings,
    get_default_qconfig_propagation_list,
    get_default_static_quant_module_mappings,
    get_default_static_quant_reference_module_mappings,
    get_dynamic_quant_module_class,
    get_embedding_qat_module_mappings,
    get_embedding_static_quant_module_mappings,
    get_quantized_operator,
    get_static_quant_module_class,
    no_observer_set,
)
from quantc.flows.eager.observing import (
    _add_observer_,
    _get_observer_dict,
    _observer_forward_hook,
    _observer_forward_pre_hook,
    _register_activation_post_process_hook,
    _remove_qconfig,
    add_observer,
    add_observer_,
    get_observer_dict,
    register_activation_post_process_hook,
)
from quantc.flows.eager.prepare import prepare, prepare_qat
from quantc.flows.eager.propagate import (
    propagate_qconfig,
    propagate_qconfig_,
    propagate_qconfig_helper,
)
from quantc.flows.eager.quantize import add_quant_dequant, default_eval_fn, quantize, quantize_dynamic, quantize_qat
from quantc.flows.eager.stubs import DeQuantStub, QuantStub, QuantWrapper
