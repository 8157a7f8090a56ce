"""The ExecuTorch flow: the PT2 export flow under the names that ExecuTorch's documents use.

m = export.capture_pre_autograd_graph(m, example_inputs)
m = prepare_pt2e(m, XNNPACKQuantizer().set_global(get_symmetric_quantization_config()))
m(*example_inputs)                                                      # calibrate
m = convert_pt2e(m)                                                     # use_reference_representation=True: integers
program = to_executorch(m, example_inputs)                              # edge dialect, partitions, .pte
"""

from quantc.flows.executorch import exir, export
from quantc.flows.executorch.lowering import to_executorch
from quantc.flows.pt2e import (
    ComposableQuantizer,
    Quantizer,
    XNNPACKQuantizer,
    convert_pt2e,
    get_symmetric_quantization_config,
    prepare_pt2e,
    prepare_qat_pt2e,
)
from quantc.reference import quantized_add, quantized_conv2d, quantized_linear

__all__ = [
    "ComposableQuantizer",
    "Quantizer",
    "XNNPACKQuantizer",
    "convert_pt2e",
    "exir",
    "export",
    "get_symmetric_quantization_config",
    "prepare_pt2e",
    "prepare_qat_pt2e",
    "quantized_add",
    "quantized_conv2d",
    "quantized_linear",
    "to_executorch",
]
