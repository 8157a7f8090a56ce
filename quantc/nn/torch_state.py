"""State dicts of torch.ao's quantized modules, in and out.

The only place of this package where tensors of torch's quantized dtypes appear: they are taken apart on the way in, and
made on the way out. What is packed there is unpacked, and packed again for the engine that is chosen.
"""

from __future__ import annotations

import re
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from quantc.errors import LoadError, SaveError
from quantc.nn.dynamic_module import HALF, RunTime
from quantc.nn.float_fallback import InFloat
from quantc.nn.kernel_ops import target
from quantc.nn.quantized.dynamic.modules.linear import Linear as DynamicLinear
from quantc.nn.quantized.dynamic.modules.rnn import RNNBase, RNNCellBase
from quantc.nn.quantized.modules.activation import Curve, Hardswish, LeakyReLU, PReLU, Softmax
from quantc.nn.quantized.modules.embedding_ops import Embedding
from quantc.nn.quantized.modules.linear import Quantize
from quantc.nn.quantized_module import QuantizedModule
from quantc.nn.quantized_tensor import QuantizedTensor
from quantc.nn.weighted_module import Weighted
from quantc.targets.kernels import packing

State = dict[str, Any]
PACKED = "_packed_params._packed_params"
PACKED_TABLE = "_packed_params._packed_weight"
CELLS = re.compile(r"_all_weight_values\.(\d+)\.param")
GRID = ("scale", "zero_point")


def from_torch_tensor(q: Any) -> QuantizedTensor:
    """A tensor of torch's quantized dtypes, or one of quantc's, as quantc's."""
    if isinstance(q, QuantizedTensor):
        return q
    levels = q.dequantize() if q.dtype is torch.quint4x2 else q.int_repr()
    if q.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return QuantizedTensor(levels, q.q_scale(), q.q_zero_point())
    scales, zeros, axis = q.q_per_channel_scales(), q.q_per_channel_zero_points(), q.q_per_channel_axis()
    if q.dtype is torch.quint4x2:  # has no integers to show: they are what its numbers were made of
        shape = [-1 if dim == axis else 1 for dim in range(q.dim())]
        levels = torch.round(levels / scales.reshape(shape) + zeros.reshape(shape)).to(torch.uint8)
    return QuantizedTensor(levels, scales, zeros, axis)


def to_torch_tensor(q: QuantizedTensor) -> Tensor:
    """A quantized tensor as one of torch's quantized dtypes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of them on every use
        if q.axis_of is None:
            return packing.quantized_weight(
                q.data_of, torch.tensor(q.q_scale()).double(), 0, torch.tensor(q.q_zero_point())
            )
        scales, zeros = q.q_per_channel_scales(), q.q_per_channel_zero_points()
        if not zeros.is_floating_point():
            return packing.quantized_weight(q.data_of, scales, q.axis_of, zeros)
        make: Any = torch._make_per_channel_quantized_tensor  # pyright: ignore[reportPrivateImportUsage]
        made: Tensor = make(q.data_of, scales.float(), zeros.float(), q.axis_of)
        return made


# -- in ----------------------------------------------------------------------------------------------------------------


def plain_state(module: QuantizedModule, state: State) -> State:
    """The state of one module as quantc's has it, from one that may be torch.ao's; names are without a prefix."""
    if not any(_is_torchs(name, value) for name, value in state.items()):
        return state
    known = {name: value for name, value in state.items() if not _is_torchs(name, value)}
    if not module.has_grid:
        known = {name: value for name, value in known.items() if name not in GRID}
    for name, value in state.items():
        known |= _taken_apart(module, name, value) if _is_torchs(name, value) else {}
    return {name: value for name, value in known.items() if value is not None}


def _is_torchs(name: str, value: Any) -> bool:
    is_quantized = isinstance(value, Tensor) and not isinstance(value, QuantizedTensor) and value.is_quantized
    return is_quantized or value is None or name.startswith(("_packed_", "_all_weight_values."))


def _taken_apart(module: QuantizedModule, name: str, value: Any) -> State:
    """The plain tensors of one entry."""
    cells = CELLS.fullmatch(name)
    if cells is not None and isinstance(module, RNNBase):
        first = 2 * int(cells[1])
        pairs = [part.__getstate__()[0] for part in value.__getstate__()[0][4]]
        names = module.weight_names[first : first + 2]
        each = [_weight(module, *pair) for pair in zip(names, *zip(*pairs, strict=True), strict=True)]
        return {key: part for state in each for key, part in state.items()}
    if name in (PACKED, "_packed_params.weight"):
        weight, bias = value if isinstance(value, tuple) else (value, None)
        return _weight(module, "weight", weight, bias)
    if name == "_packed_params.bias":
        return {"bias": value}
    if name == PACKED_TABLE:
        return _parts(module, "weight", value)
    if name.startswith("_packed_weight_"):
        return _weight(module, name.removeprefix("_packed_"), *value.__getstate__()[0])
    if isinstance(value, Tensor):
        return _parts(module, name, value)
    if value is None or name.endswith(".dtype"):
        return {}
    raise LoadError(
        f"{name} is not known as part of a quantized module",
        where=f"the state of {type(module).__name__}",
        advice="save it with a version of torch.ao that writes _packed_params, or convert the float model again",
    )


def _weight(module: QuantizedModule, name: str, weight: Tensor, bias: Tensor | None) -> State:
    added = name.replace("weight", "bias", 1)
    return {**_parts(module, name, weight), added: None if bias is None else bias.detach().float()}


def _parts(module: QuantizedModule, name: str, weight: Tensor) -> State:
    """A weight under the names it is held by."""
    if not weight.is_quantized:
        return {name: weight.detach().to(HALF)}
    parts = from_torch_tensor(weight).parts()
    if isinstance(module, RunTime):
        if bool(parts["zero_point"].any()):
            raise LoadError(f"{name} is not symmetric", where=type(module).__name__)
        return {name: parts["data"], f"{name}_scale": parts["scale"].float()}
    scale = parts["scale"].float() if isinstance(module, Embedding) else parts["scale"]
    return {name: parts["data"], f"{name}_scale": scale, f"{name}_zero_point": parts["zero_point"]}


# -- out ---------------------------------------------------------------------------------------------------------------


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


def _weighted(module: Weighted) -> tuple[int, State]:
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
    Weighted: _weighted,
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
"""How modules are written, by their kind; the first that fits."""
