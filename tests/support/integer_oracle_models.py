"""Models for the rules of a table: those the conformance kit draws, replayed with other shapes, settings and data."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias

import torch
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.fx.node import map_arg

from quantc.annotate.quantizer import Backend
from quantc.ir.dialect import argument, arguments, op_name
from quantc.ir.program import Program
from quantc.patterns.table import Rule
from quantc.pipeline.registry import BACKENDS
from quantc.spec.formats import Role
from quantc.testing.choices import NoExampleError
from quantc.testing.rule_trial import Standing, Subject, Trial
from quantc.testing.synthesis import Model, Sketch, models_of

Draw = Callable[[st.SearchStrategy[Any]], Any]
Changes = dict[str, Any]
"""Arguments of a call, by name."""
Variation: TypeAlias = "Callable[[_Replay, fx.Node], Changes]"


@cache
def subject(backend: str) -> Subject:
    """A backend by name, as it is and with every output it can yield quantized."""
    return Subject(BACKENDS[backend])


@cache
def kit_trials(backend: str, rule: str, *, in_float: bool = False) -> tuple[Trial, ...]:
    """The models the conformance kit draws for a rule, as far as the rule takes them; with results `in_float`."""
    own = Subject(subject(backend).without_outputs) if in_float else subject(backend)
    found = own.demanded.table[rule]
    made = models_of(found, _activations(own.demanded, found)).made
    trials = [Trial.of(own, found, model) for _, model in made]
    return tuple(trial for trial in trials if trial.verdict.standing is Standing.TAKEN)


def _activations(backend: Backend, rule: Rule) -> frozenset[str]:
    """The names whose roles are not those of weights: they come from outside."""
    own = {name: backend.outcome(role) for name, role in rule.roles.items() if role in backend.roles}
    return frozenset(rule.roles) - {name for name, outcome in own.items() if outcome.spec.role is not Role.ACT}


def varied(trial: Trial, draw: Draw) -> Trial:
    """The model with other settings, shapes, weights and data; with other data alone if the rule wants it so."""
    for table in (VARIATIONS, {}):
        try:
            program = _Replay(trial.model.program, draw, table).program()
        except NoExampleError:
            continue
        model = Model(f"varied {trial.model.label}", program, trial.model.claimed)
        again = Trial.of(trial.subject, trial.rule, model)
        if again.verdict.standing is Standing.TAKEN:
            return again
    raise AssertionError(f"{trial.rule.name} does not take {trial.model.label} with other data")


# -- numbers -----------------------------------------------------------------------------------------------------


def numbers(shape: tuple[int, ...], draw: Draw) -> Tensor:
    """Data of some size around some centre: scales and zero points follow."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    size: float = draw(st.sampled_from([0.03, 0.4, 1.0, 5.0, 60.0]))
    centre: float = draw(st.sampled_from([0.0, 0.0, 0.7, -0.7, 3.0, -3.0]))
    return size * (torch.randn(shape, generator=generator) + centre)


def weights(shape: tuple[int, ...], draw: Draw) -> Tensor:
    """Weights whose channels differ in size; one of them may be all zero."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    found: Tensor = torch.randn(shape, generator=generator) * draw(st.sampled_from([0.02, 0.3, 2.0]))
    for axis in range(min(2, len(shape))):
        sizes = torch.rand(shape[axis], generator=generator) + 0.1
        sizes[0] *= draw(st.sampled_from([0.0, 1.0, 4.0])) if axis == 0 else 1.0
        found = found * sizes.reshape([-1 if a == axis else 1 for a in range(len(shape))])
    return found


# -- replay ------------------------------------------------------------------------------------------------------


@dataclass
class _Replay:
    """A program, drawn again node by node with other arguments."""

    source: Program
    draw: Draw
    variations: Mapping[str, Variation]
    sketch: Sketch = field(default_factory=Sketch)
    made: dict[fx.Node, fx.Node] = field(default_factory=dict)
    shapes: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)
    """Of inputs and constants that are to have other shapes."""

    def program(self) -> Program:
        calls = [node for node in self.source.graph.nodes if node.op == "call_function"]
        for node in calls:
            if node.target is not operator.getitem:
                self._call(node)
        root = next(node for node in reversed(calls) if node.target is not operator.getitem)
        return self.sketch.program(self.made[root])

    def _call(self, node: fx.Node) -> None:
        changes = self.variations.get(op_name(node), _as_it_is)(self, node)
        given = {row.name: value for row, value in zip(arguments(_target(node)), node.args, strict=False)}
        given |= {
            row.name: node.kwargs[row.aten_name] for row in arguments(_target(node)) if row.aten_name in node.kwargs
        }
        given |= changes
        rows = arguments(_target(node))
        last = max((n for n, row in enumerate(rows) if row.name in given and not row.keyword_only), default=-1)
        args = tuple(map_arg(given.get(row.name, row.default), self.at) for row in rows[: last + 1])
        keywords = {
            row.aten_name: map_arg(given[row.name], self.at) for row in rows if row.keyword_only and row.name in given
        }
        self.made[node] = self.sketch.call(node.target, args, keywords)

    def at(self, node: fx.Node) -> fx.Node:
        """The node that stands for one of the source; inputs and constants are made when they are first read."""
        if node not in self.made:
            self.made[node] = self._leaf(node)
        return self.made[node]

    def _leaf(self, node: fx.Node) -> fx.Node:
        old = self.value(node)
        if not old.is_floating_point():
            return (
                self.sketch.input(node.name, old) if node.op == "placeholder" else self.sketch.constant(node.name, old)
            )
        shape = self.shapes.get(node, tuple(old.shape))
        if node.op == "placeholder":
            return self.sketch.input(node.name, numbers(shape, self.draw))
        new = weights(shape, self.draw)
        return self.sketch.constant(node.name, new.abs() + 0.1 if node.name == "var" else new)

    def value(self, node: fx.Node) -> Tensor:
        """What an input or a constant of the source is."""
        if node.op == "get_attr":
            found = self.source.tensor(node)
            assert found is not None
            return found
        inputs = self.source.graph.find_nodes(op="placeholder")
        value: Tensor = (self.source.example_inputs or ())[inputs.index(node)]
        return value

    def reshape(self, node: Any, *shape: int) -> bool:
        """Ask for another shape of an input or a constant; False if that is not possible any more."""
        if not isinstance(node, fx.Node) or node.op == "call_function" or node in self.made:
            return False
        self.shapes[node] = shape
        return True

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """The shape a value has, or is going to have."""
        if node in self.made:
            return tuple(self.sketch.values[self.made[node]].shape)
        return self.shapes.get(node, tuple(self.value(node).shape))

    def integer(self, low: int, high: int) -> int:
        return int(self.draw(st.integers(low, high)))


def _target(node: fx.Node) -> Any:
    return node.target


def _as_it_is(replay: _Replay, node: fx.Node) -> Changes:
    return {}


def _windows(replay: _Replay, rank: int, **ranges: tuple[int, int]) -> Changes:
    """A number for each axis, for each of some settings."""
    return {name: [replay.integer(*ends) for _ in range(rank)] for name, ends in ranges.items()}


def _conv(replay: _Replay, node: fx.Node) -> Changes:
    x, w, *bias = node.args[:3]
    assert isinstance(x, fx.Node)
    rank = len(replay.shape(x)) - 2
    transposed = "transpose" in op_name(node)
    is_grouped = argument(node, "groups") > 1
    # the rules tell transposed convolutions with groups from those without
    groups = replay.draw(st.sampled_from(([2, 4] if is_grouped else [1]) if transposed else [1, 2, 4]))
    inputs, outputs = groups * replay.integer(1, 3), groups * replay.integer(1, 3)
    kernel = [replay.integer(1, 3) for _ in range(rank)]
    sizes = [replay.integer(6, 9) if rank < 3 else replay.integer(5, 6) for _ in range(rank)]
    if not replay.reshape(x, replay.integer(1, 4), inputs, *sizes):
        return {}
    each = (inputs, outputs // groups) if transposed else (outputs, inputs // groups)
    replay.reshape(w, *each, *kernel)
    replay.reshape(bias[0] if bias else None, outputs)
    changes = _windows(replay, rank, stride=(1, 3), padding=(0, 2), dilation=(1, 2))
    if transposed:
        changes["padding"] = [replay.integer(0, side - 1) for side in kernel]
        changes["output_padding"] = [replay.integer(0, step - 1) for step in changes["stride"]]
    return {**changes, "groups": groups}


def _linear(replay: _Replay, node: fx.Node) -> Changes:
    x, w, *bias = node.args[:3]
    assert isinstance(x, fx.Node)
    lead = [replay.integer(1, 4) for _ in replay.shape(x)[:-1]]
    inputs, outputs = replay.integer(1, 70), replay.integer(1, 12)
    if replay.reshape(x, *lead, inputs):
        replay.reshape(w, outputs, inputs)
        replay.reshape(bias[0] if bias else None, outputs)
    return {}


def _binary(replay: _Replay, node: fx.Node) -> Changes:
    """Another shape for both, or one of them broadcast."""
    x, y = node.args[:2]
    tensors = [item for item in (x, y) if isinstance(item, fx.Node)]
    free = [item for item in tensors if item.op != "call_function" and item not in replay.made]
    if not free:
        return {}
    if len(free) == len(tensors):
        shape = tuple(replay.integer(1, 7) for _ in replay.shape(tensors[0]))
    else:
        shape = next(replay.shape(item) for item in tensors if item not in free)
    for item in free:
        replay.reshape(item, *shape)
    if len(tensors) == 2 and replay.draw(st.booleans()):
        replay.reshape(free[-1], *(1 if replay.draw(st.booleans()) else size for size in shape))
    return {}


def _pool(replay: _Replay, node: fx.Node) -> Changes:
    x = node.args[0]
    assert isinstance(x, fx.Node)
    rank = len(replay.shape(x)) - 2
    replay.reshape(x, replay.integer(1, 3), replay.integer(1, 4), *(replay.integer(4, 8) for _ in range(rank)))
    changes = _windows(replay, rank, kernel_size=(1, 3), stride=(1, 3))
    changes["padding"] = [replay.integer(0, size // 2) for size in changes["kernel_size"]]
    changes["ceil_mode"] = replay.draw(st.booleans())
    if "avg" in op_name(node):
        changes["count_include_pad"] = replay.draw(st.booleans())
    return changes


def _adaptive(replay: _Replay, node: fx.Node) -> Changes:
    x = node.args[0]
    assert isinstance(x, fx.Node)
    rank = len(replay.shape(x)) - 2
    replay.reshape(x, replay.integer(1, 3), replay.integer(1, 4), *(replay.integer(3, 8) for _ in range(rank)))
    return {"output_size": [replay.integer(1, 4) for _ in range(rank)]}


def _reduction(replay: _Replay, node: fx.Node) -> Changes:
    x = node.args[0]
    assert isinstance(x, fx.Node)
    rank = len(replay.shape(x))
    replay.reshape(x, *(replay.integer(1, 7) for _ in range(rank)))
    axes = replay.draw(st.lists(st.integers(0, rank - 1), min_size=1, max_size=rank, unique=True))
    return {"dim": axes, "keepdim": replay.draw(st.booleans())}


def _any_shape(replay: _Replay, node: fx.Node) -> Changes:
    x = node.args[0]
    if isinstance(x, fx.Node):
        replay.reshape(x, *(replay.integer(1, 9) for _ in replay.shape(x)))
    return {}


def _join(replay: _Replay, node: fx.Node) -> Changes:
    items: Any = node.args[0]
    shape = [replay.integer(1, 6) for _ in replay.shape(items[0])]
    axis = replay.integer(0, len(shape) - 1)
    for item in items:
        own = list(shape)
        own[axis] = replay.integer(1, 6) if op_name(node) == "cat" else own[axis]
        replay.reshape(item, *own)
    return {"dim": axis}


VARIATIONS: dict[str, Variation] = {
    **dict.fromkeys([f"{kind}{n}d" for kind in ("conv", "conv_transpose") for n in (1, 2, 3)], _conv),
    "linear": _linear,
    **dict.fromkeys(["add", "sub", "mul"], _binary),
    **dict.fromkeys([f"{kind}_pool{n}d" for kind in ("max", "avg") for n in (1, 2, 3)], _pool),
    **dict.fromkeys([f"adaptive_avg_pool{n}d" for n in (1, 2, 3)], _adaptive),
    **dict.fromkeys([f"aten.adaptive_max_pool{n}d.default" for n in (1, 2, 3)], _adaptive),
    **dict.fromkeys(["mean", "sum", "amax", "amin"], _reduction),
    **dict.fromkeys(
        ["relu", "clamp", "hardswish", "hardsigmoid", "silu", "mish", "gelu", "leaky_relu", "elu", "selu", "celu"],
        _any_shape,
    ),
    **dict.fromkeys(
        ["sigmoid", "tanh", "softplus", "softshrink", "softmax", "rsub", "div", "clone", "detach"], _any_shape
    ),
    **dict.fromkeys(["cat", "stack"], _join),
}
"""By op: what may be otherwise than in the kit's models."""
