"""Removal of training modules from a program, keeping the trained values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import fx, nn

from quantc.calibration.graph_observers import redirect
from quantc.errors import TrainingError
from quantc.ir.decisions import SameAs
from quantc.ir.program import TRAINED, Program, attribute
from quantc.ir.site_index import Places
from quantc.ir.sites import SetAside
from quantc.observe.trained import Trained
from quantc.qat.biases import SnappedBias
from quantc.qat.fake import FakeQuantizer, HandedOn
from quantc.qat.fake_quantize_insertion import MODES, NORMS
from quantc.qat.norms import LiveNorm, UnfoldNorm
from quantc.rewrite.affine_folding import Channels, affine_of_norm, fold_affine


def fake_quantizers(module: nn.Module) -> Iterator[FakeQuantizer]:
    """Fake quantizers of a module, each once."""
    return (child for child in module.modules() if isinstance(child, FakeQuantizer))


def read_fake_quantizers(program: Program) -> None:
    """Store the fake quantizers' qparams in the plan. TrainingError if one of them has none."""
    fakes = list(fake_quantizers(program.root))
    faults = [(fake, why) for fake in fakes if (why := fake.why_unfit()) is not None]
    if faults and len(faults) == sum(fake.trained_by_data for fake in fakes):
        raise TrainingError(
            f"{program.name} was not trained: {faults[0][1]}",
            where=f"{len(faults)} fake quantizers have found no scale, first {faults[0][0].where}",
            advice="call prepared.train(), run batches through it, and step an optimizer, before qc.convert",
        )
    for fake in fakes:
        found = fake.trained()
        if found is not None:
            program.plan.statistics[fake.group] = Trained(fake.spec.granularity, found)


def remove_fake_quantizers(program: Program) -> int:
    """Bypass and remove fake quantizers; their number. One may be called for several tensors that share a scale."""
    calls = {
        node: module
        for node, module in module_calls(program)
        if isinstance(module, FakeQuantizer | HandedOn | SnappedBias | UnfoldNorm | LiveNorm)
    }
    readers = dict.fromkeys(user for node in calls for user in node.users if user not in calls)
    sources: dict[fx.Node, fx.Node] = {}
    for node in calls:
        source = node.args[0]
        while isinstance(source, fx.Node) and source in calls:
            source = source.args[0]
        if isinstance(source, fx.Node):
            sources[node] = source
    redirect(program, sources, readers)
    for node in reversed(list(calls)):
        program.erase(node)
    return len({id(module) for module in calls.values() if isinstance(module, FakeQuantizer)})


def module_calls(program: Program) -> Iterator[tuple[fx.Node, nn.Module]]:
    """Nodes that call modules, in order."""
    for _, graph in program.graphs():
        owner = program.owner(graph)
        for node in graph.nodes:
            module = attribute(owner, str(node.target)) if node.op == "call_module" else None
            if isinstance(module, nn.Module):
                yield node, module


@dataclass(frozen=True)
class Unfolded:
    """A conv or linear that reads weight and bias directly again, and the tensors of its norm."""

    product: fx.Node
    row: SetAside
    weight: fx.Node
    bias: fx.Node
    norm: tuple[fx.Node | None, ...]
    """Scale, shift, mean and variance."""


def unfold_norms(program: Program) -> list[Unfolded]:
    """Remove the folding of norms in training. Fake quantizers and the norms themselves must be gone."""
    found = [_unfold(program, product, row) for product, row in program.set_aside.rows.items()]
    for each in found:
        program.set_aside.drop(each.product)
    return found


def _unfold(program: Program, product: fx.Node, row: SetAside) -> Unfolded:
    item = product.args[1]
    fold = item.args[0] if isinstance(item, fx.Node) and item.args else None
    if not isinstance(fold, fx.Node):
        raise TrainingError(
            f"{row.name} cannot be folded: {product.name} no longer reads the weight it was trained with",
            where=program.describe(product),
            advice="change the program before it is prepared, or after it is converted",
        )
    weight, bias, *norm = (part if isinstance(part, fx.Node) else None for part in fold.args)
    product.args = (product.args[0], weight, bias, *product.args[3:])
    for node in [*fold.users, fold]:
        program.erase(node)
    program.touch()
    return Unfolded(product, row, cast(fx.Node, weight), cast(fx.Node, bias), tuple(norm))


@torch.no_grad()
def fold_norms(program: Program) -> int:
    """Fold the detached norms into weights and biases permanently; their number."""
    found = unfold_norms(program)
    for each in found:
        _fold(program, each)
    return len(found)


def _fold(program: Program, each: Unfolded) -> None:
    product, name = each.product, each.row.name
    weight = program.tensor(each.weight)
    gamma, beta, mean, var = (None if node is None else program.tensor(node) for node in each.norm)
    if weight is None:
        raise TrainingError(f"{name} cannot be folded: the weight of {product.name} cannot be read")
    channels = Channels.of(product)
    affine = affine_of_norm(gamma, beta, mean, var, each.row.eps, channels.count(weight))
    new_weight, new_bias = fold_affine(weight, program.tensor(each.bias), affine, channels)
    if not bool(torch.isfinite(new_weight).all() and torch.isfinite(new_bias).all()):
        raise TrainingError(
            f"{name} cannot be folded into {product.name}: weight or bias would be NaN or infinite",
            where=program.describe(product),
            advice="training has diverged: go on from an earlier state, with a lower learning rate",
        )
    _store(program, each.weight, new_weight)
    _store(program, each.bias, new_bias)
    program.note_inference_only(f"batch norm {name} was folded into {product.name}")


def _store(program: Program, node: fx.Node, value: torch.Tensor) -> None:
    """Write a tensor over the one that a node reads."""
    parent, _, leaf = str(node.target).rpartition(".")
    holder = program.owner(node.graph).get_submodule(parent)
    is_parameter = isinstance(getattr(holder, leaf), nn.Parameter)
    setattr(holder, leaf, nn.Parameter(value, requires_grad=False) if is_parameter else value)


def end_modes(program: Program) -> None:
    """Write mode-dependent arguments into the graph again, with their inference values."""
    for _, graph in program.graphs():
        for holder in (TRAINED, NORMS, MODES):
            program.owner(graph)._modules.pop(holder, None)
    program.training = True  # the batch counters that only training has are still there
    program.eval()
    for _, graph in program.graphs():
        for node in list(graph.find_nodes(op="call_module")):
            if str(node.target).startswith(f"{MODES}.") and not node.users:
                program.erase(node)


def forget_places(program: Program, gone: set[fx.Node]) -> None:
    """Remove nodes that are about to be erased from the plan."""
    places = Places(program)
    names = {(places.paths[node.graph], node.name) for node in gone}
    plan = program.plan

    def stays(graph: str, node: str) -> bool:
        return (graph, node) not in names

    roots = {site: group.outcome for group in plan.groups for site in group.places}
    plan.outcomes = {
        site: roots[site]
        if isinstance(outcome, SameAs) and not stays(outcome.site.graph, outcome.site.node)
        else outcome
        for site, outcome in plan.outcomes.items()
        if stays(site.graph, site.node)
    }
    plan.groups = tuple(
        replace(
            group,
            values=tuple(site for site in group.values if stays(site.graph, site.node)),
            places=tuple(site for site in group.places if stays(site.graph, site.node)),
        )
        for group in plan.groups
    )
