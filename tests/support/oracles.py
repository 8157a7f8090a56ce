"""Quantized graphs of other tools, beside ours: who reads what in which form, with which numbers.

Every tool's result is brought to one form first, an ATen graph with `quantized_decomposed` ops. In it an op goes by its
name and how many of that name came before: `conv2d#0`.
"""

from __future__ import annotations

import copy
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.fx.node import map_arg
from torch.utils.flop_counter import FlopCounterMode

from quantc.annotate.quantizer import Backend
from quantc.ir.decisions import Quantize

EPS = 2.0**-12
"""The smallest scale, of activations and weights alike, in all comparisons."""
Batches = list[tuple[Tensor, ...]]

SPELLINGS = {
    "add_": "add", "relu_": "relu", "hardtanh_": "hardtanh", "silu_": "silu", "hardswish_": "hardswish",
    "mul_": "mul", "view": "reshape", "clamp": "hardtanh", "leaky_relu_": "leaky_relu", "concat": "cat",
    "_unsafe_view": "reshape", "transpose": "permute", "bmm": "matmul", "mm": "matmul",
}  # fmt: skip
"""Other names for the same op. `clamp` is how we spell relu6, and `hardtanh` how the others do."""
SILENT = ("detach", "alias", "clone", "contiguous", "dropout", "dropout_", "lift_fresh_copy")
"""Ops that do nothing to the numbers and are not counted."""


@dataclass(frozen=True)
class Read:
    """How an op gets an operand: the numbers of its quantization, and a digest of it if it is a constant."""

    scale: str
    """The bits of the scale, or of all scales."""
    zero_point: str
    qmin: int
    qmax: int
    dtype: torch.dtype
    axis: int | None = None
    constant: str = ""

    def __str__(self) -> str:
        axis = "" if self.axis is None else f" axis {self.axis}"
        constant = f" constant {self.constant}" if self.constant else ""
        return f"{self.dtype} {self.qmin}..{self.qmax}{axis} scale {self.scale} zero {self.zero_point}{constant}"


Placement = dict[str, tuple[Read | None, ...]]
"""What each op reads, operand by operand; None is float. Biases, and operands that are not float, are left out."""


def min_max(backend: Backend) -> Backend:
    """A backend whose ranges are the extremes of the data, as torch's min-max observers have them."""
    own = ((role, outcome) for role, outcome in backend.roles.items() if isinstance(outcome, Quantize))
    return backend.but(**{role: Quantize(outcome.spec.but(observe="minmax", eps=EPS)) for role, outcome in own})


def sqnr(reference: Tensor, result: Tensor) -> float:
    """Signal over error, in dB."""
    signal = reference.double().square().sum()
    error = (reference.double() - result.double()).square().sum()
    return float(10 * torch.log10(signal / error))


def whole_sqnr(model: Callable[..., Any], quantized: Callable[..., Any], batches: Batches) -> float:
    """The SQNR of all outputs of some batches, taken together."""
    with torch.no_grad():
        pairs = [(model(*batch), quantized(*batch)) for batch in batches]
    return sqnr(torch.cat([a.flatten() for a, _ in pairs]), torch.cat([b.flatten() for _, b in pairs]))


# -- reading a graph -------------------------------------------------------------------------------------------


def op_of(node: fx.Node) -> str | None:
    """The name of an op, one for all its spellings; None if it is none, or does nothing."""
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
        return None
    name = node.target._schema.name.removeprefix("aten::")
    return None if name in SILENT else SPELLINGS.get(name, name)


def decomposed(node: object, verb: str) -> bool:
    return (
        isinstance(node, fx.Node)
        and isinstance(node.target, OpOverload)
        and node.target._schema.name.startswith(f"quantized_decomposed::{verb}_per_")
    )


def numbered(module: fx.GraphModule) -> Iterator[tuple[str, fx.Node]]:
    """The ops of a graph with their names and numbers."""
    seen: Counter[str] = Counter()
    for node in module.graph.nodes:
        name = op_of(node)
        if name is not None and (node.users or name.endswith("_")):
            yield f"{name}#{seen[name]}", node
            seen[name] += 1


def placement(module: fx.GraphModule) -> Placement:
    """Which op of a graph reads which operand quantized, and how."""
    found: Placement = {}
    for name, node in numbered(module):
        found[name] = tuple(_read(module, operand) for operand in data_operands(node))
    for node in module.graph.find_nodes(op="output"):
        found["output#0"] = tuple(_read(module, operand) for operand in node.all_input_nodes)
    return found


def data_operands(node: fx.Node) -> list[fx.Node]:
    """The operands an op computes on, without the bias; parameters of norms are none either."""
    kept: list[fx.Node] = []
    limit = {"conv1d": 2, "conv2d": 2, "conv3d": 2, "linear": 2, "layer_norm": 1, "batch_norm": 1}.get(
        op_of(node) or ""
    )
    map_arg(node.args[:limit], kept.append)
    return kept


def _read(module: fx.GraphModule, operand: fx.Node) -> Read | None:
    operand = _heard(operand)
    if not decomposed(operand, "dequantize"):
        return None
    scale, zero_point, *rest = (_constant(module, arg) for arg in operand.args[1:])
    axis, qmin, qmax, dtype = rest if len(rest) == 4 else (None, *rest)
    constant = _evaluated(module, operand.args[0])
    digest = "" if constant is None else _bits(constant)
    return Read(_bits(scale), _bits(zero_point), qmin, qmax, dtype, axis, digest)


def _heard(node: fx.Node) -> fx.Node:
    """A node, or the one before it if it does nothing."""
    while isinstance(node.target, OpOverload) and node.target._schema.name.removeprefix("aten::") in SILENT:
        node = node.all_input_nodes[0]
    return node


def _constant(module: fx.GraphModule, arg: Any) -> Any:
    if isinstance(arg, fx.Node):
        return _evaluated(module, arg)
    return arg


def _evaluated(module: fx.GraphModule, arg: Any) -> Tensor | None:
    """What a node comes to if it is computed from constants alone; None if it is not."""
    if not isinstance(arg, fx.Node):
        return None
    if arg.op == "get_attr":
        value: Tensor = _attribute(module, str(arg.target))
        return value.detach()
    if not callable(arg.target):
        return None
    values: dict[fx.Node, Tensor] = {}
    for node in arg.all_input_nodes:
        value_of_node = _evaluated(module, node)
        if value_of_node is None:
            return None  # at once: a tensor that is read along many paths would be evaluated along each
        values[node] = value_of_node
    if not values:
        return None
    result: Tensor = arg.target(*map_arg(arg.args, values.get), **map_arg(arg.kwargs, values.get))
    return result


def _attribute(module: nn.Module, path: str) -> Any:
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part)
    return value


def _bits(value: Any) -> str:
    """Numbers bit for bit, in few letters. A scale counts as the float32 it is rounded to when it is used."""
    if isinstance(value, Tensor) and value.numel() > 1:
        value = value.to(torch.int64) if not value.dtype.is_floating_point else value.float()
        return hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()[:16]
    number = value.item() if isinstance(value, Tensor) else value
    return repr(torch.tensor(number, dtype=torch.float32).item()) if isinstance(number, float) else str(number)


def differences(ours: Placement, theirs: Placement) -> dict[str, str]:
    """What two placements do not agree in: by operand, as `conv2d#0[1]`, or by an op that only one has."""
    found = {name: f"only {who}" for name, who in _unshared(ours, theirs)}
    for name in (name for name in ours if name in theirs):
        for index, (mine, other) in enumerate(zip(ours[name], theirs[name], strict=True)):
            if mine != other:
                found[f"{name}[{index}]"] = f"ours {mine or 'float'}; theirs {other or 'float'}"
    return found


def _unshared(ours: Placement, theirs: Placement) -> Iterator[tuple[str, str]]:
    yield from ((name, "ours") for name in ours if name not in theirs)
    yield from ((name, "theirs") for name in theirs if name not in ours)


# -- running a graph -------------------------------------------------------------------------------------------


class _Recorder(fx.Interpreter):
    """Keeps what each op reads and yields."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.names = {node: name for name, node in numbered(module)}
        self.operands: dict[str, list[Any]] = {}
        self.results: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n in self.names:
            self.operands[self.names[n]] = [self.env[node] for node in data_operands(n)]
            self.results[self.names[n]] = result
        return result


@torch.no_grad()
def worst_op_error(ours: fx.GraphModule, theirs: fx.GraphModule, inputs: Iterable[Tensor]) -> tuple[float, str]:
    """Each op of ours is given what the same op of theirs reads: the largest difference of results, against the
    largest result of the op, and the op it is at."""
    recorder = _Recorder(theirs)
    recorder.run(*inputs)
    worst = (0.0, "")
    for name, node in numbered(ours):
        given = recorder.operands.get(name)
        if given is None:
            continue
        env: dict[fx.Node, Any] = dict(zip(data_operands(node), given, strict=True))
        # weights and biases are our own: they are part of what is compared
        env |= {operand: value for operand in node.all_input_nodes if (value := _evaluated(ours, operand)) is not None}
        if not callable(node.target):
            continue
        result = node.target(*map_arg(node.args, env.get), **map_arg(node.kwargs, env.get))
        other = recorder.results[name]
        if not isinstance(result, Tensor) or result.shape != other.shape:
            continue
        error = float((result - other).abs().max() / other.abs().max().clamp_min(1e-12))
        worst = max(worst, (error, name))
    return worst


class _Counter(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.all = 0
        self.int8 = 0
        self.rest: Counter[str] = Counter()

    def run_node(self, n: fx.Node) -> Any:
        with FlopCounterMode(display=False) as counter:
            result = super().run_node(n)
        count = counter.get_total_flops() // 2
        self.all += count
        name = op_of(n)
        if (
            count
            and name is not None
            and all(decomposed(_heard(operand), "dequantize") for operand in data_operands(n))
        ):
            self.int8 += count
        elif count:
            self.rest[n.name] += count
        return result


@torch.no_grad()
def int8_share(module: fx.GraphModule, inputs: Iterable[Tensor]) -> tuple[float, dict[str, int]]:
    """The share of multiply-adds whose two factors both come quantized, counted by torch, and the ops of the rest."""
    counter = _Counter(module)
    counter.run(*inputs)
    return counter.int8 / counter.all, dict(counter.rest)


# -- the others ------------------------------------------------------------------------------------------------


def quiet() -> None:
    """The other tools announce their deprecation at every call."""
    logging.getLogger("torchao").setLevel(logging.ERROR)
    logging.getLogger("torch.ao").setLevel(logging.ERROR)


def pt2e(model: nn.Module, quantizer: Any, batches: Batches) -> fx.GraphModule:
    """A model quantized by torchao's PT2E."""
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    prepared = prepare_pt2e(torch.export.export(model, batches[0]).module(), quantizer)
    with torch.no_grad():
        for batch in batches:
            prepared(*batch)
    converted: fx.GraphModule = convert_pt2e(prepared)
    return converted


def pt2e_x86(model: nn.Module, batches: Batches, *, with_matmul: bool = False) -> fx.GraphModule:
    """A model quantized by PT2E for x86 with its own defaults; matmul is not among them."""
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    config = x86.get_default_x86_inductor_quantization_config()
    quantizer = x86.X86InductorQuantizer().set_global(config)
    if with_matmul:
        quantizer.set_function_type_qconfig(torch.matmul, config)
    return pt2e(model, quantizer, batches)


def fx_default(model: nn.Module, engine: str, batches: Batches) -> fx.GraphModule:
    """A model quantized by FX graph mode with its own defaults for an engine."""
    from torch.ao.quantization import get_default_qconfig_mapping

    return fx_mode(copy.deepcopy(model), get_default_qconfig_mapping(engine), None, batches)


def fx_mode(model: nn.Module, qconfigs: Any, backend: Any, batches: Batches) -> fx.GraphModule:
    """A model quantized by torch.ao's FX graph mode, its reference form exported."""
    from torch.ao.quantization.quantize_fx import _convert_to_reference_decomposed_fx, prepare_fx

    prepared = prepare_fx(model, qconfigs, batches[0], backend_config=backend)
    with torch.no_grad():
        for batch in batches:
            prepared(*batch)
    reference = _convert_to_reference_decomposed_fx(prepared, qconfig_mapping=qconfigs, backend_config=backend)
    exported: fx.GraphModule = torch.export.export(reference, batches[0]).module()
    return exported
