"""State dicts as torch.ao's quantized modules write them: weights are packed again, for the engine that is chosen.

The way in is `load_state_dict` of the modules; `quantc.nn.torch_tensors` takes apart what they are given.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from quantc.errors import SaveError
from quantc.nn.float_fallback import InFloat
from quantc.nn.kernel_ops import target
from quantc.nn.quantized.dynamic.modules.linear import Linear as DynamicLinear
from quantc.nn.quantized.dynamic.modules.rnn import RNNBase, RNNCellBase
from quantc.nn.quantized.modules.activation import Curve, Hardswish, LeakyReLU, PReLU, Softmax
from quantc.nn.quantized.modules.embedding_ops import Embedding
from quantc.nn.quantized.modules.linear import Quantize
from quantc.nn.quantized_module import QuantizedModule
from quantc.nn.quantized_tensor import QuantizedTensor
from quantc.nn.torch_tensors import PACKED, PACKED_TABLE, State, to_torch_tensor
from quantc.nn.weighted_module import Weighted


def torch_state_dict(model: nn.Module) -> OrderedDict[str, Any]:
    """The state dict of a model as torch.ao's modules of the same names save it, for their `load_state_dict`."""
    made: Any = OrderedDict()
    made._metadata = OrderedDict()
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        written = next((writer for kind, writer in WRITERS.items() if isinstance(module, kind)), None)
        version = module._version
        if written is None:
            module._save_to_state_dict(made, prefix, False)
        else:
            version, entries = written(module)
            made.update({f"{prefix}{name}": value for name, value in entries.items()})
            packed = {name.rpartition(".")[0] for name in entries if name.startswith("_packed_params.")}
            made._metadata.update({f"{prefix}{name}": {"version": min(version, 3)} for name in packed})
        made._metadata[path] = {"version": version}
    return made  # type: ignore[no-any-return]


def _grid(module: Any) -> State:
    if module.out_dtype is not torch.uint8:
        raise SaveError(
            f"{type(module).__name__} yields {module.out_dtype}, and torch.ao's modules of that name quint8",
            advice="observe results as quint8",
        )
    return {"scale": torch.tensor(module.scale), "zero_point": torch.tensor(module.zero_point)}


def _quantize(module: Any) -> tuple[int, State]:
    return 1, {"scale": module.scale.clone(), "zero_point": module.zero_point.clone()}


def _in_float(module: InFloat) -> tuple[int, State]:
    plain: State = {}
    nn.Module._save_to_state_dict(module, plain, "", False)
    grid = _grid(module)
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        grid = {name: value.reshape(1) for name, value in grid.items()}
    return module._version, {**plain, **grid}


def _write_weighted(module: Weighted) -> tuple[int, State]:
    """A linear layer or a convolution. A dynamic one has no grid, and torch.ao's saves a scale of 1."""
    grid: State = _grid(module) if module.has_grid else {"scale": torch.tensor(1.0), "zero_point": torch.tensor(0)}
    weight, bias = to_torch_tensor(module.weight()), module.bias()
    if module.op == "linear":
        return 3, {**grid, "_packed_params.dtype": torch.qint8, PACKED: (weight, bias)}
    return 1, {"weight": weight, "bias": bias, **grid}


def _dynamic_linear(module: DynamicLinear) -> tuple[int, State]:
    weight = module.weight()
    is_half = not isinstance(weight, QuantizedTensor)
    stored = weight.float() if not isinstance(weight, QuantizedTensor) else to_torch_tensor(weight)
    packed = {"_packed_params.dtype": torch.float16 if is_half else torch.qint8, PACKED: (stored, module.bias())}
    return 4, {"scale": torch.tensor(1.0), "zero_point": torch.tensor(0), **packed}


def _layers(module: RNNBase) -> tuple[int, State]:
    cells = module._cells(target())
    return 2, {f"_all_weight_values.{index}.param": cell for index, cell in enumerate(cells)}


def _cell(module: RNNCellBase) -> tuple[int, State]:
    return 1, {
        f"_packed_{name}": packed for name, packed in zip(module.weight_names, module.packed(target()), strict=True)
    }


def _embedding(module: Embedding) -> tuple[int, State]:
    weight = to_torch_tensor(module.weight())
    if module.dtype is torch.quint4x2:
        scales, zeros = weight.q_per_channel_scales(), weight.q_per_channel_zero_points()
        weight = torch.quantize_per_channel(weight.dequantize(), scales, zeros, 0, torch.quint4x2)
    return 1, {"_packed_params.dtype": weight.dtype, PACKED_TABLE: weight}


def _nothing(module: nn.Module) -> tuple[int, State]:
    """torch.ao does not save what these need: it must be made by converting the same model."""
    return module._version, {}


WRITERS: dict[type[nn.Module], Callable[[Any], tuple[int, State]]] = {
    DynamicLinear: _dynamic_linear,
    RNNBase: _layers,
    RNNCellBase: _cell,
    Weighted: _write_weighted,
    Embedding: _embedding,
    Quantize: _quantize,
    InFloat: _in_float,
    Hardswish: lambda module: (1, _grid(module)),
    LeakyReLU: lambda module: (1, _grid(module)),
    Curve: _nothing,
    Softmax: _nothing,
    PReLU: _nothing,
    QuantizedModule: lambda module: (1, _grid(module)),
}
"""Writers by kind of module; the first that fits is used."""
