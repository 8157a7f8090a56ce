"""An invented NPU: int8 with power-of-two scales, requantized by a rounding shift, int32 accumulators."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from npu_interpreter import Interpreter
from torch import fx

from quantc import INT8, INT8_WEIGHT, INT32_BIAS, Backend, Program, pipelines
from quantc.integer.grid import grid_of
from quantc.ir.dialect import is_op, op_name
from quantc.ir.types import dtype_of
from quantc.patterns import Match, Rule, RuleTable, aten, const, op, optional, predicate
from quantc.qdq.ops import is_dequantize, is_quantize
from quantc.rewrite.partition import Region
from quantc.spec.arithmetic import Arithmetic
from quantc.targets.target import Invariant, Target

LANES, KERNEL = 4, 7
CURVES = op("sigmoid", "tanh", "hardswish", "hardsigmoid", "silu", "gelu", args="x")
MOVES = op("max_pool2d", "flatten", args="x")


@predicate("npu-conv")
def why_not_conv(match: Match) -> str | None:
    """Output channels fill the lanes, and kernels fit the window."""
    weight = match.program.tensor(match.node("w"))
    if weight is None or weight.dim() != 4:
        return "it is no convolution over two axes of known weights"
    if weight.shape[0] % LANES:
        return f"it has {weight.shape[0]} output channels, and the NPU wants a multiple of {LANES}"
    if max(weight.shape[2:]) > KERNEL:
        return f"its kernel is {list(weight.shape[2:])}, and the NPU has {KERNEL} × {KERNEL} at most"
    return None


ACT = INT8.but(scheme="symmetric", scale_bits=1)
WEIGHT = INT8_WEIGHT.but(scale_bits=1)
FORMS = {"qdq", "integer"}
FACTORS = ("x", const("w"), const("b?"))
PRODUCT = {"x": "act", "w": "weight", "b": "bias", "out": "act"}
BACKEND = Backend(
    "npu",
    RuleTable(
        "npu",
        (
            Rule("conv", aten.conv(*FACTORS) >> optional(aten.clamp), PRODUCT, when="npu-conv", supports=FORMS),
            Rule("linear", aten.linear(*FACTORS) >> optional(aten.clamp), PRODUCT, supports=FORMS),
            Rule("add", aten.add >> optional(aten.clamp), {"x": "act", "y": "like x", "out": "act"}, supports=FORMS),
            Rule("curve", CURVES, {"x": "act", "out": "act"}, supports=FORMS),
            Rule("move", MOVES, {"x": "pass", "out": "like x"}, supports=FORMS),
        ),
    ),
    roles={"act": ACT, "weight": WEIGHT, "bias": INT32_BIAS},
    summary="an invented NPU: int8, power-of-two scales, requantized by shifts",
)


def not_powers_of_two(program: Program) -> Iterator[tuple[fx.Node, str]]:
    for node in program.nodes():
        grid = grid_of(program, node) if is_quantize(node) or is_dequantize(node) else None
        if grid is not None and grid.dtype == torch.int8 and bool((torch.frexp(grid.scale).mantissa != 0.5).any()):
            yield node, f"its scale is {float(grid.scale.max()):.4g}"


def unequal_summands(program: Program) -> Iterator[tuple[fx.Node, str]]:
    for node, claim in program.plan.claims.rows.items():
        if claim.quantizer == "npu" and is_op(node, "add"):
            grids = [grid_of(program, item) for item in node.all_input_nodes]
            if any(grid is None or grids[0] is None or not grid.equals(grids[0]) for grid in grids):
                yield node, "its summands have two scales"


def unfilled_lanes(program: Program) -> Iterator[tuple[fx.Node, str]]:
    for node, claim in program.plan.claims.rows.items():
        channels = node.meta["val"].shape[1] if claim.quantizer == "npu" and is_op(node, "conv2d") else 0
        if channels % LANES:
            yield node, f"it has {channels} channels"


INSTRUCTIONS = ("conv", "linear", "sum", "requantize", "lookup", "max_pool2d", "flatten")


def runs_on_npu(node: fx.Node) -> bool:
    """Whether an op of the integer form has an instruction."""
    given = _arguments(node) if _name(node) in INSTRUCTIONS else {}
    return bool(given) and dtype_of(node) == torch.int8 and not given.get("ceil_mode")


def _name(node: fx.Node) -> str:
    return op_name(node).removeprefix("quantc.").removesuffix(".default")


def _arguments(node: fx.Node) -> dict[str, Any]:
    rows = node.target._schema.arguments  # type: ignore[union-attr]
    defaults = {row.name.replace("self", "x"): row.default_value for row in rows}
    return {**defaults, **dict(zip(defaults, node.args, strict=False)), **node.kwargs}


class Artifact:
    """Instructions of every region. Called like the model: the host runs the rest."""

    def __init__(self, program: Program) -> None:
        self.partition = pipelines.integer().run_on_copy(program).partition(runs_on_npu)
        self.regions = {region.name: _instructions(region) for region in self.partition.regions}
        self.partition.run_with(lambda region: Interpreter(self.regions[region.name]))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.partition(*args, **kwargs)

    def to_data(self) -> dict[str, Any]:
        return {"regions": len(self.regions), "instructions": sum(len(each["code"]) for each in self.regions.values())}

    def save(self, path: Path) -> None:
        Path(path).write_text(json.dumps({"host": str(self.partition.host), "regions": self.regions}))


def _instructions(region: Region) -> dict[str, Any]:
    program = region.program

    def written(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [written(item) for item in value]
        if not isinstance(value, fx.Node):
            return str(value) if isinstance(value, torch.dtype) else value
        tensor = program.tensor(value)
        if tensor is None:
            return f"%{value.name}"
        raw = base64.b64encode(tensor.detach().contiguous().numpy().tobytes()).decode()
        return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "data": raw}

    code = [
        {
            "op": _name(node),
            "out": f"%{node.name}",
            **{name: written(value) for name, value in _arguments(node).items()},
        }
        for node in program.graph.nodes
        if node.op == "call_function"
    ]
    return {"in": [f"%{name}" for name in region.inputs], "code": code, "out": [f"%{name}" for name in region.outputs]}


TARGET = Target(
    "npu",
    Artifact,
    suffix=".npu",
    recognizes=lambda path: path.read_text()[:9] == '{"host": ',
    arithmetic=Arithmetic(rounding="half-up", multiplier="shift"),
    invariants=(
        Invariant("scales are powers of two", not_powers_of_two),
        Invariant("both inputs of add share a scale", unequal_summands),
        Invariant(f"channels are a multiple of {LANES}", unfilled_lanes),
    ),
)
