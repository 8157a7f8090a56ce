"""Decomposition of attention into matmuls that a backend can quantize."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import fx

from quantc.config.config import QuantConfig
from quantc.config.resolve import resolve
from quantc.config.selectors import AnySelector, ByEdge, ByNode, ByOp, ancestors
from quantc.ir.decisions import Float
from quantc.ir.dialect import argument, is_op, op_name
from quantc.ir.program import Program, Stage
from quantc.ir.sites import ModeValue
from quantc.ir.types import TensorType, tensor_type
from quantc.pipeline.pipeline import Outcome, Pass, Preserves
from quantc.rewrite.builder import Calls, Size, known_type
from quantc.spec.formats import Offer, Timing

aten = torch.ops.aten
PRODUCT = "matmul"
"""The op of which attention has two."""
NOT_NAMED = f'they are quantized only where the config names them, as in config.set_op("{PRODUCT}", spec)'


class DecomposeAttention(Pass):
    """Decompose `scaled_dot_product_attention` into matmul, scale, mask, softmax, matmul.

    Causal attention, bool and float masks, `scale=` and grouped heads (`enable_gqa=True`) are preserved, and so are
    dynamic shapes. A fully masked row yields zeros, as before. Attention with active dropout, in a dtype other than
    float32, or with unknown types is left whole, and the log says so.

    Where its matmuls stay float, attention stays whole: torch has a fused kernel for it. They do if the config says so,
    as in the modes "dynamic" and "weight-only", and if the backend quantizes them only when a config names them, as in
    `set_op("matmul", spec)`.

    Inactive dropout cannot be switched on again afterwards, so a program that had it is inference-only; unless it is
    kept, as for training.
    """

    name: ClassVar[str] = "decompose-attention"
    needs: ClassVar[Stage] = Stage.CANONICAL
    before: ClassVar[Stage | None] = Stage.ANNOTATED
    preserves: ClassVar[Preserves] = Preserves.CLOSELY

    config: QuantConfig = Field(default_factory=QuantConfig)
    """The user's rules for the products."""
    products: Offer = Offer.YES
    """The backend's offer of static quantization for the products: "yes", "named" if the config has to name them, or
    "no"."""

    dropout: Literal["drop", "keep"] = "drop"
    """"keep" makes an op of dropout that follows the mode and is switched off; "drop" leaves it out."""

    def for_config(self, config: QuantConfig) -> DecomposeAttention:
        """The pass with a config's rules for attention; the same object if there are none."""
        says_so = any(rule.timing is not Timing.STATIC for rule in config.rules)
        depends = self.products is not Offer.YES and bool(config.rules)
        return self.model_copy(update={"config": config}) if says_so or depends else self

    def left_whole(self, program: Program) -> dict[fx.Node, str]:
        """Attentions none of whose matmuls will be quantized, and why.

        A rule that names ops or nodes may refer to the decomposed ops, which do not exist yet.
        """
        found = [node for node in program.nodes() if is_op(node, "sdpa")]
        known = _Known(program) if found else None
        if known is None or any(known.lacks(rule.select) for rule in self.config.rules):
            return {}
        resolution = resolve(self.config.rules, program, must_match=False)
        whole: dict[fx.Node, str] = {}
        for node in found:
            setting = resolution.setting(node)
            if setting is not None and (isinstance(setting.use, Float) or setting.use.spec.timing is Timing.DYNAMIC):
                whole[node] = str(setting.rule)
            elif self.products is not Offer.YES:
                whole[node] = NOT_NAMED
        return whole

    def run(self, program: Program) -> Outcome:
        found = [node for node in program.nodes() if is_op(node, "sdpa")]
        left: list[str] = []
        causal = _CausalMasks(program)
        whole = self.left_whole(program)
        for node in found:
            reason = _why_not(node) if node not in whole else f"its products are float: {whole[node]}"
            if reason is not None:
                left.append(f"{program.describe(node)} is left whole: {reason}")
                continue
            program.forward(node, _take_apart(program, node, causal, self._dropout(program, node)))
        count = len(found) - len(left)
        return Outcome(count > 0, (*((f"took {count} apart",) if count else ()), *left))

    def _dropout(self, program: Program, node: fx.Node) -> float:
        """Dropout probability in training that is to be kept."""
        mode = program.modes.get(node)
        if mode is None or self.dropout == "keep":
            return 0.0 if mode is None else float(mode.train)
        program.note_inference_only(f"{program.describe(node)} was taken apart without its dropout")
        return 0.0


class _Known:
    """Names that exist in a program so far."""

    def __init__(self, program: Program) -> None:
        self.ops = {op_name(node) for node in program.nodes()}
        self.names = {
            f"{path}/{node.name}" if path else node.name for path, graph in program.graphs() for node in graph.nodes
        }
        for path in {origin.module_path for origin in program.origins.rows.values()}:
            self.names.update(ancestors(path))

    def lacks(self, select: AnySelector) -> bool:
        """True if a selector names something that exists only after decomposition, or the matmuls themselves."""
        match select:
            case ByOp():
                return select.op == PRODUCT or select.op not in self.ops
            case ByNode():
                return select.graph is None and select.node not in self.names
            case ByEdge():
                return not {select.producer, select.consumer} <= self.names
            case _:
                return False


def _why_not(node: fx.Node) -> str | None:
    if argument(node, "dropout_p") != 0:
        return f"its dropout is {argument(node, 'dropout_p')}"
    for name in ("q", "k", "v"):
        kind = tensor_type(argument(node, name))
        if kind is None:
            return f"the type of {name} is unknown; capture with example inputs"
        if kind.dtype != torch.float32:
            return f"{name} is {kind}, and only float32 is taken apart"
        if kind.rank < 2:
            return f"{name} is {kind}, which has no rows"
    mask = argument(node, "mask")
    kind = tensor_type(mask)
    if mask is not None and (kind is None or kind.dtype not in (torch.bool, torch.float32)):
        return f"its mask is {kind or 'of unknown type'}, not of bool or float32"
    if argument(node, "scale") is None and not isinstance(known_type(argument(node, "q")).shape[-1], int):
        return "the size of its heads is dynamic"
    return _why_not_heads(node)


def _why_not_heads(node: fx.Node) -> str | None:
    if not argument(node, "enable_gqa"):
        return None
    heads = {name: known_type(argument(node, name)).shape[-3:-2] for name in ("q", "k", "v")}
    if heads["q"] == heads["k"] == heads["v"] != ():
        return None  # there is nothing to repeat
    unknown = (name for name, size in heads.items() if not size or not isinstance(size[0], int))
    return next((f"the number of heads of {name} is dynamic" for name in unknown), None)


def _take_apart(program: Program, node: fx.Node, causal: _CausalMasks, dropout: float) -> fx.Node:
    calls = Calls(program, node)
    q, k, v, mask = (argument(node, name) for name in ("q", "k", "v", "mask"))
    if argument(node, "enable_gqa"):
        k, v = _repeat(calls, k, q), _repeat(calls, v, q)
    scores = calls.matmul(q, calls.transpose(k))
    scale = _scale(node, q)
    if scale != 1:
        scores = calls.elementwise("mul", scores, scale)
    if argument(node, "is_causal"):
        scores = calls.elementwise("masked_fill", scores, causal.at(calls, q, k), -math.inf)
    if mask is not None:
        scores = _masked(calls, scores, mask)
    # a mask may remove a whole row, which a plain softmax would turn into NaN; a causal one cannot
    softmax = aten.softmax.int if mask is None else aten._safe_softmax.default
    kind = known_type(scores)
    weights = calls.call(softmax, scores, kind.rank - 1, kind=kind)
    if dropout:
        weights = calls.call(aten.dropout.default, weights, dropout, False, kind=kind)
        program.modes[weights] = ModeValue(2, train=True, eval=False)
    return calls.matmul(weights, v)


def _scale(node: fx.Node, q: fx.Node) -> float:
    given = argument(node, "scale")
    width = known_type(q).shape[-1]
    return given if given is not None else 1 / math.sqrt(int(width))


def _masked(calls: Calls, scores: fx.Node, mask: fx.Node) -> fx.Node:
    if known_type(mask).dtype is torch.float32:
        return calls.elementwise("add", scores, mask)
    return calls.elementwise("masked_fill", scores, calls.elementwise(aten.logical_not.default, mask), -math.inf)


def _repeat(calls: Calls, x: fx.Node, q: fx.Node) -> fx.Node:
    """Each head of `x` as often as the heads of `q` need it."""
    kind = known_type(x)
    heads = known_type(q).shape[-3]
    if heads == kind.shape[-3]:
        return x
    repeats = int(heads) // int(kind.shape[-3])
    shape = (*kind.shape[:-3], heads, *kind.shape[-2:])
    repeated = TensorType(kind.dtype, shape)
    return calls.call(aten.repeat_interleave.self_int, x, repeats, kind.rank - 3, kind=repeated)


class _CausalMasks:
    """Causal masks: made once per size in a graph."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.made: dict[tuple[fx.Graph, Size, Size], fx.Node] = {}

    def at(self, calls: Calls, q: fx.Node, k: fx.Node) -> fx.Node:
        rows, columns = known_type(q).shape[-2], known_type(k).shape[-2]
        key = (q.graph, rows, columns)
        if key not in self.made:
            kind = TensorType(torch.bool, (rows, columns))
            sizes: list[Any] = [calls.size(q, -2), calls.size(k, -2)]
            ones = self.program.emit(
                aten.new_ones.default, (q, sizes), {"dtype": torch.bool}, before=calls.before, value=kind
            )
            self.made[key] = calls.call(aten.triu.default, ones, 1, kind=kind)
        return self.made[key]
