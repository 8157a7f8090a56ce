"""Modules that users have written themselves, in a quantized model: swapped for their quantized versions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from quantc.flows.fx.custom_config import ConvertCustomConfig, CustomConfigError, QuantType
from quantc.flows.fx.kept_whole import SHAPES, watch
from quantc.flows.fx.observed_module import ObservedGraphModule, Preparation
from quantc.flows.fx.state import Grid
from quantc.ir.decisions import Fixed, Quantize
from quantc.ir.program import Program, attribute
from quantc.ir.site_index import Places
from quantc.ir.sites import Site
from quantc.spec.formats import DType
from quantc.spec.numerics import QParams

QUANTIZED = {DType.UINT8: torch.quint8, DType.INT8: torch.qint8}


def quantize_modules(
    program: Program,
    prepared: Preparation,
    custom: ConvertCustomConfig,
    quant_type_of: Callable[[Any], QuantType | None],
    convert: Callable[[ObservedGraphModule, ConvertCustomConfig], nn.Module],
) -> None:
    """Put quantized modules in the place of observed ones, and convert those that were prepared on their own."""
    done: set[str] = set()
    for node in program.graph.find_nodes(op="call_module"):
        name = str(node.target)
        module = attribute(program.root, name)
        if name in done or not isinstance(module, nn.Module):
            continue
        done.add(name)
        if isinstance(module, ObservedGraphModule):
            quantized: nn.Module | None = convert(module, custom)
            quantized.__dict__["is_standalone"] = True
        else:
            quantized = _quantize_module(program, node, module, prepared, custom, quant_type_of)
        if quantized is not None:
            watch(quantized, name, module.__dict__.get(SHAPES))
            parent, _, leaf = name.rpartition(".")
            setattr(program.root.get_submodule(parent), leaf, quantized)
    program.touch()


def _quantize_module(
    program: Program,
    node: fx.Node,
    module: nn.Module,
    prepared: Preparation,
    custom: ConvertCustomConfig,
    quant_type_of: Callable[[Any], QuantType | None],
) -> nn.Module | None:
    swaps = custom.observed_to_quantized_mapping
    kinds = [kind for kind, classes in swaps.items() if type(module) in classes]
    qconfig = getattr(module, "qconfig", None)
    if not kinds or qconfig is None:
        return None
    kind = quant_type_of(qconfig)
    if kind not in kinds:
        raise CustomConfigError(
            f"{node.target} is a {type(module).__name__}, for which there is a {' and a '.join(kinds)} version, "
            f"and its QConfig is {kind}",
            where="observed_to_quantized_custom_module_class",
            advice=f"list it under {kind!r}, or give it another QConfig in prepare",
        )
    if kind is QuantType.STATIC:
        _show_observer(node, module, prepared)
    made: nn.Module = swaps[kind][type(module)].from_observed(module)  # type: ignore[attr-defined]
    if kind is QuantType.STATIC:
        grids = _grids(program, node)
        made.register_forward_pre_hook(GivenQuantized(grids))
        made.register_forward_hook(dequantize_output)
    return made


def _show_observer(node: fx.Node, module: nn.Module, prepared: Preparation) -> None:
    """An observed module has the observer of its result, which stands behind it in the graph, under the usual name."""
    site = Site("", node.name, out=0)
    for group in prepared.program.plan.groups:
        if site in group.places and group.name in prepared.observers:
            observer = attribute(prepared.program.root, prepared.observers[group.name][0])
            module.activation_post_process = copy.deepcopy(observer)


def _grids(program: Program, node: fx.Node) -> dict[int, Grid]:
    """The grids of the tensors that a module is given quantized, by the number of the operand."""
    plan, places = program.plan, Places(program)
    count = len(places.operands(node))
    grids: dict[int, Grid] = {}
    for group in plan.groups:
        for index in range(count):
            if places.use(node, index) in group.places and isinstance(group.outcome, Quantize | Fixed):
                found: QParams = plan.qparams[group.name]
                dtype = QUANTIZED[group.outcome.spec.dtype]
                grids[index] = (float(found.scale), int(found.zero_point), dtype)
    return grids


class GivenQuantized:
    """Forward pre-hook: quantize float tensors that lie on their grids, for modules written for torch's quantized dtypes."""

    def __init__(self, grids: dict[int, Grid]) -> None:
        self.grids = grids

    def __call__(self, module: nn.Module, args: Any) -> Any:
        leaves, spec = pytree.tree_flatten(args)
        tensors = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        for index, place in enumerate(tensors):
            if index in self.grids:
                leaves[place] = torch.quantize_per_tensor(leaves[place], *self.grids[index])
        return pytree.tree_unflatten(leaves, spec)


def dequantize_output(module: nn.Module, args: Any, output: Any) -> Any:
    """Forward hook: dequantize a module's output. It stays on its grid, and the next op quantizes it from there."""
    return pytree.tree_map_only(Tensor, lambda x: x.dequantize() if x.is_quantized else x, output)
