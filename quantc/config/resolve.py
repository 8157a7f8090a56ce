"""Resolution of a config on a program: the setting of each node, role and edge.

Rules by node, op and type are looked up, and rules by path are matched once a module, not once a node, so the cost does
not grow with nodes times rules.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

from torch import fx

from quantc.config.config_rule import ConfigRule, Use
from quantc.config.selectors import (
    AnySelector,
    ByAll,
    ByEdge,
    ByModule,
    ByNode,
    ByOp,
    ByRegex,
    ByType,
    ancestors,
    graphs_around,
)
from quantc.errors import ConfigError, suggest
from quantc.ir.decisions import Float
from quantc.ir.dialect import op_name
from quantc.ir.program import Program
from quantc.ir.sites import Origin
from quantc.spec.formats import Role

MAX_NAMES = 30


@dataclass(frozen=True)
class Setting:
    """The setting for a site, and the rule it comes from."""

    use: Use
    rule: ConfigRule
    is_own: bool = False
    """True if the rule names the op's own layer, not an enclosing module; always False for FLOAT."""

    @property
    def why_float(self) -> str:
        """The reason for an op that this setting leaves float."""
        if self.rule.is_weight_only:
            return f"it has no weight, and only weights are quantized: {self.rule}"
        return f"left float, as the config says: {self.rule}"

    def __str__(self) -> str:
        return f"{self.use} (rule {self.rule})"


@dataclass(frozen=True)
class Resolution:
    """The settings of a config for the nodes and edges of a program; none where the backend decides."""

    nodes: dict[fx.Node, dict[Role, Setting]] = field(default_factory=dict)
    edges: dict[tuple[fx.Node, fx.Node], Setting] = field(default_factory=dict)

    def setting(self, node: fx.Node, role: Role = Role.ACT) -> Setting | None:
        """The setting for the tensors of one role at a node."""
        return self.nodes.get(node, {}).get(role)

    def edge(self, producer: fx.Node, consumer: fx.Node) -> Setting | None:
        """The setting for the tensor from one node to another: that of the edge, else that of the consumer."""
        return self.edges.get((producer, consumer), self.setting(consumer))


def resolve(rules: Sequence[ConfigRule], program: Program, *, must_match: bool = True) -> Resolution:
    """Apply a config to a program. ConfigError if a rule matches nothing and `must_match`."""
    index = _Index(rules)
    index.learn_types(program)
    nodes: dict[fx.Node, dict[Role, Setting]] = {}
    names: dict[str, fx.Node] = {}
    for path, graph in program.graphs():
        for node in graph.nodes:
            full_name = f"{path}/{node.name}" if path else node.name
            names[full_name] = node
            if node.op in ("placeholder", "get_attr", "output"):
                continue
            found = _settings(index.rules_for(full_name, node, program), rules, program.origins.get(node))
            if found:
                nodes[node] = found
    edges = _edges(rules, program, index, names)
    if must_match:
        _refuse_unmatched(rules, index, names)
    return Resolution(nodes, edges)


def _settings(numbers: Iterable[int], rules: Sequence[ConfigRule], origin: Origin | None) -> dict[Role, Setting]:
    found: dict[Role, Setting] = {}
    for number in sorted(numbers):
        rule = rules[number]
        said = rule.settings
        if Role.ACT in said and not isinstance(said[Role.ACT], Float):
            # an op that is to compute on integers is no longer left float or weight-only: its weight is quantized again
            found = {role: setting for role, setting in found.items() if not _is_about_all(setting.rule)}
        is_own = not isinstance(rule.use, Float) and origin is not None and _names(rule.select, origin)
        found |= {role: Setting(use, rule, is_own) for role, use in said.items()}
    return found


def _names(select: AnySelector, origin: Origin) -> bool:
    """True if a selector names the module that a node comes from itself."""
    match select:
        case ByModule() | ByRegex():
            return select.matches(origin.module_path)
        case ByType():
            return select.matches(origin.module_type)
        case _:
            return False


def _is_about_all(rule: ConfigRule) -> bool:
    """True if a rule decides about an op as a whole: FLOAT, or weight-only."""
    return rule.is_weight_only or (isinstance(rule.use, Float) and rule.role is None)


class _Index:
    """The rules of a config by kind of selector, and those that have matched so far."""

    def __init__(self, rules: Sequence[ConfigRule]) -> None:
        self.exact: dict[tuple[str, str], list[int]] = defaultdict(list)
        self.by_path: list[tuple[int, ByModule | ByRegex]] = []
        self.by_type: list[tuple[int, ByType]] = []
        self.everywhere: list[int] = []
        self.matched: set[int] = set()
        self.types: dict[str, str] = {}
        self.ops: set[str] = set()
        self.of_module: dict[str, tuple[int, ...]] = {}
        for number, rule in enumerate(rules):
            self._add(number, rule.select)

    def _add(self, number: int, select: AnySelector) -> None:
        match select:
            case ByNode() if select.graph is not None:
                self.exact["graph", select.graph].append(number)
            case ByNode():
                self.exact["node", select.node].append(number)
            case ByOp():
                self.exact["op", select.op].append(number)
            case ByType():
                self.by_type.append((number, select))
            case ByModule() | ByRegex():
                self.by_path.append((number, select))
            case ByAll():
                self.everywhere.append(number)
            case ByEdge():
                pass

    def learn_types(self, program: Program) -> None:
        """Record the class of each module with an op of its own."""
        for origin in program.origins.rows.values():
            if origin.module_type:  # in nested graphs the type may be lost though the path is known
                self.types[origin.module_path] = origin.module_type

    def rules_for(self, full_name: str, node: fx.Node, program: Program) -> list[int]:
        origin = program.origins.get(node)
        op = op_name(node)
        self.ops.add(op)
        found = [*self.everywhere, *self.exact.get(("op", op), ()), *self.exact.get(("node", full_name), ())]
        for graph in graphs_around(full_name):
            found += self.exact.get(("graph", graph), ())
        if origin is not None:
            found += self._rules_for_module(origin.module_path)
        self.matched.update(found)
        return found

    def _rules_for_module(self, path: str) -> tuple[int, ...]:
        if path not in self.of_module:
            around = ancestors(path)
            found = [number for number, select in self.by_path if any(select.matches(outer) for outer in around)]
            types = [self.types[outer] for outer in ("", *around) if outer in self.types]
            found += [number for number, select in self.by_type if any(select.matches(kind) for kind in types)]
            self.of_module[path] = tuple(found)
        return self.of_module[path]


def _edges(
    rules: Sequence[ConfigRule], program: Program, index: _Index, names: dict[str, fx.Node]
) -> dict[tuple[fx.Node, fx.Node], Setting]:
    edges: dict[tuple[fx.Node, fx.Node], Setting] = {}
    numbered = [(number, rule) for number, rule in enumerate(rules) if isinstance(rule.select, ByEdge)]
    if not numbered:
        return edges
    inside: dict[str, list[fx.Node]] = defaultdict(list)
    for node, origin in program.origins.rows.items():
        for outer in ancestors(origin.module_path):
            inside[outer].append(node)
    for number, rule in numbered:
        select = rule.select
        if not isinstance(select, ByEdge):
            continue
        producers = set(_end(select.producer, names, inside))
        for consumer in _end(select.consumer, names, inside):
            for producer in producers.intersection(consumer.all_input_nodes):
                edges[producer, consumer] = Setting(rule.use, rule)
                index.matched.add(number)
    return edges


def _end(name: str, names: dict[str, fx.Node], inside: dict[str, list[fx.Node]]) -> list[fx.Node]:
    return [names[name]] if name in names else inside.get(name, [])


def _refuse_unmatched(rules: Sequence[ConfigRule], index: _Index, names: dict[str, fx.Node]) -> None:
    unmatched = [rule for number, rule in enumerate(rules) if number not in index.matched]
    if not unmatched:
        return
    faults = [f"{rule.select}: {_advice(rule.select, index, names)}" for rule in unmatched]
    raise ConfigError(
        f"{len(unmatched)} of {len(rules)} rules match nothing: {'; '.join(str(r.select) for r in unmatched)}",
        where="config",
        advice="\n    ".join(faults),
    )


def _advice(select: AnySelector, index: _Index, names: dict[str, fx.Node]) -> str:
    match select:
        case ByModule() | ByRegex():
            known = {outer for path in index.types for outer in ancestors(path)}
            return _closest(str(select).strip("/"), known, "modules")
        case ByType():
            kinds = {kind.rpartition(".")[2] for kind in index.types.values()}
            return _closest(select.name.rpartition(".")[2], kinds, "types")
        case ByOp():
            return _closest(select.op, index.ops, "ops")
        case ByNode() if select.node in names:
            return "it is an input or a constant; use set_edge for what it feeds"
        case ByNode() if select.graph is not None:
            known = {graph for name in names for graph in graphs_around(name)}
            return _closest(select.graph, known, "nested graphs")
        case ByNode():
            return _closest(select.node, names, "nodes")
        case ByEdge():
            return _edge_advice(select, index, names)
        case ByAll():
            return "the program has no ops"


def _edge_advice(select: ByEdge, index: _Index, names: dict[str, fx.Node]) -> str:
    known = {*names, *(outer for path in index.types for outer in ancestors(path))}
    for end in (select.producer, select.consumer):
        if end not in known:
            return _closest(end, known, "nodes and modules")
    feeds = list(_feeds(select.consumer, names))
    return f"no tensor goes that way; {select.consumer} takes {', '.join(feeds) or 'nothing'}"


def _feeds(consumer: str, names: dict[str, fx.Node]) -> Iterator[str]:
    if consumer in names:
        yield from (node.name for node in names[consumer].all_input_nodes)


def _closest(name: str, known: Iterable[str], noun: str) -> str:
    """Suggestions that stay readable in large programs: only the closest names if there are many."""
    names = sorted(name for name in known if name)
    if len(names) > MAX_NAMES:
        names = get_close_matches(name, names, n=5, cutoff=0.3) or names[:5]
        noun = f"{noun} among many"
    return suggest(name, names, noun=noun)
