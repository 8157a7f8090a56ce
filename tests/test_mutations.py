"""What mutates a Program is a pass, or is called by passes alone: if it is not in the printed pipeline it does not happen."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import entry_points

import pytest

from tests.support.reference_graph import References, engine_trees

ON_GRAPHS = {
    "create_node",
    "call_function",
    "call_method",
    "call_module",
    "node_copy",
    "graph_copy",
    "erase_node",
    "eliminate_dead_code",
    "inserting_before",
    "inserting_after",
    "replace_all_uses_with",
    "replace_input_with",
    "replace_pattern",
    "insert_arg",
    "update_arg",
    "update_kwarg",
    "prepend",
}
"""Methods of fx graphs and nodes that change a graph."""
ON_PROGRAMS = {"emit", "constant", "subgraph", "read", "replace", "forward", "inherit", "erase", "touch"}
"""Methods of Program that do."""
PROGRAMS = {"program", "own", "view", "twin", "copy", "prepared", "converted"}
"""What variables that hold programs are called, where no annotation and no assignment tells."""
COPIES = {"Program", "clone", "draft", "run_on_copy", "parse", "load"}
"""Calls that give a program."""
FIELDS = {"args", "kwargs", "target", "op"}
"""Fields of nodes."""
HOMES = ("quantc.passes.", "quantc.capture.", "quantc.flows.")
"""Passes, and what is exempt: capture and flows build graphs that are no programs yet, or not any more."""
IR = ("quantc.ir.program:", "quantc.ir.program_graph:")
"""Define the words that mutations are made of."""
DOORS = ("quantc.ir.program:Program", "quantc.ir.program_graph:ProgramGraph")
"""Their methods are called from everywhere."""
TABLES = (
    "quantc.rewrite.spellings:spelling",
    "quantc.rewrite.spellings:_register_aliases",
    "quantc.integer.semantics:computes",
    "quantc.integer.library:integer_op",
)
"""Decorators of rows, which `canonicalize`, `lower-integer` and torch's dispatcher call."""

OWN_GRAPH = "it builds a graph of its own, which is no part of a program before"
ON_A_COPY = "it changes a copy, to look at it or to compare with; no program that is lowered comes of it"
LEFT: dict[str, str] = {
    "quantc.annotate.float_view": ON_A_COPY,
    "quantc.inspect.surgery": ON_A_COPY,
    "quantc.integer.reference_check": OWN_GRAPH,
    "quantc.ir.lift_constants": OWN_GRAPH,
    "quantc.nn.kernel_ops": OWN_GRAPH,
    "quantc.rewrite.constant_order": "it drops constants that a region of a partition, or a kernel, has taken over",
    "quantc.rewrite.partition": "it makes programs of the regions of a copy",
    "quantc.targets.executorch.exporting": OWN_GRAPH,
    "quantc.targets.kernels.compiled_islands": OWN_GRAPH,
    "quantc.targets.kernels.weight_ownership": "it puts weights that kernels hold back, in a copy",
    "quantc.testing.synthesis": OWN_GRAPH,
    "quantc.text.graph_parser": OWN_GRAPH,
}
"""Modules that mutate and are reached from elsewhere, with the reason. May only shrink."""
ALIKE = [f"quantc.inspect.{module}: as_inference_has_it" for module in ("coverage", "explain")]
"""What passes lend to others: the view of a trained program, which is a copy."""
EXPORTED = "ExecuTorch's format: it hands on names, marks and initial values so, on graphs of torch.export"
META: dict[str, str] = {
    "quantc.cli.error_output": "metadata of click's contexts",
    "quantc.targets.executorch.executorch_lowering": EXPORTED,
    "quantc.targets.executorch.partitioning": EXPORTED,
    "quantc.targets.executorch.weight_only_linear": EXPORTED,
}
"""Modules that read or write keys of `node.meta` other than `val`, with the reason. May only shrink."""


def mutations(statements: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Statements and calls that change a graph, as far as names and annotations tell."""
    nodes = [node for statement in statements for node in ast.walk(statement)]
    programs = PROGRAMS | {name for node in nodes for name in _programs(node)}
    for node in nodes:
        match node:
            case ast.Call(func=ast.Attribute(value=owner, attr=name)):
                is_found = name in ON_GRAPHS or (name in ON_PROGRAMS and _last(owner) in programs)
            case ast.Call(func=ast.Name(id="setattr"), args=[owner, ast.Constant(value=name), _]):
                is_found = name in FIELDS and _last(owner) != "self"
            case ast.Attribute(value=owner, attr=name, ctx=ast.Store()):
                is_found = name in FIELDS and _last(owner) != "self"
            case _:
                is_found = False
        if is_found:
            yield node


def _programs(node: ast.AST) -> Iterator[str]:
    """Names that are annotated as programs, or assigned one."""
    match node:
        case (
            ast.arg(arg=name, annotation=ast.expr() as kind) | ast.AnnAssign(target=ast.Name(id=name), annotation=kind)
        ) if "Program" in (each.id for each in ast.walk(kind) if isinstance(each, ast.Name)):
            yield name
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=function)) if _last(function) in COPIES:
            yield name


def _last(value: ast.expr) -> str:
    """The last name of `self.program`, or `program`."""
    return value.attr if isinstance(value, ast.Attribute) else value.id if isinstance(value, ast.Name) else ""


@cache
def references() -> References:
    return References.of(engine_trees())


def reached() -> dict[str, set[str]]:
    """By a module that mutates: what leads there that is no pass."""
    found: dict[str, set[str]] = {}
    for place, statements in references().bodies.items():
        if place.startswith((*HOMES, *IR)) or next(mutations(statements), None) is None:
            continue
        if ways := references().reached_from(place, HOMES, TABLES, DOORS):
            found.setdefault(place.partition(":")[0], set()).update(ways)
    return found


def test_what_mutates_a_program_is_called_by_passes_alone() -> None:
    found = reached()
    new = {module: sorted(ways)[:5] for module, ways in found.items() if module not in LEFT}
    assert not new, "make it a pass, or call it from one"
    assert set(LEFT) <= set(found), "what has gone from the code goes from the list"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("graph.erase_node(node)", 1),
        ("with graph.inserting_before(node): graph.create_node('call_function', f)", 2),
        ("program.emit(f, before=node)", 1),
        ("task.program.replace(old, new)", 1),
        ("node.args = (x,)", 1),
        ("node.target, node.args, node.kwargs = f, (x,), {}", 3),
        ("def f(p: Program | None) -> None: p.emit(f, before=node)", 1),
        ("draft = prepared_.clone(); draft.erase(node); setattr(node, 'args', ())", 2),
        ("text.replace('a', 'b'); module.forward(x); self.args = x; y = node.args", 0),
    ],
)
def test_mutations_are_seen(text: str, count: int) -> None:
    assert len([*mutations([ast.parse(text)])]) == count


def test_outside_pipelines_nothing_of_a_pass_is_called() -> None:
    """Others know the classes of passes, to name them in pipelines; what passes define beside them is theirs."""
    found = []
    for module, tree in engine_trees().items():
        if module.startswith(HOMES):
            continue
        for node in ast.walk(tree):
            match node:
                case ast.ImportFrom(module=str(source), names=names) if source.startswith("quantc.passes."):
                    found += [f"{module}: {each.name}" for each in names if not each.name[0].isupper()]
                case ast.Call(func=ast.Attribute(value=ast.Call(func=ast.Name(id=name)), attr="run")) if (
                    name in pass_names()
                ):
                    found.append(f"{module}: {ast.unparse(node)}")
    assert sorted(set(found)) == ALIKE


def pass_names() -> set[str]:
    return {entry.value.rpartition(":")[2] for entry in entry_points(group="quantc.passes")}


def test_what_leads_to_a_mutation_is_found() -> None:
    texts = {
        "quantc.passes.tidy": "from quantc.rewrite.words import drop\ndef run(program): drop(program)",
        "quantc.rewrite.words": "def drop(program): program.erase(1)\ndef add(program): program.emit(1)",
        "quantc.verbs.lower": "from quantc.rewrite import words\nTABLE = (words.add,)\ndef lower(program): TABLE[0](program)",
    }
    made = References.of({module: ast.parse(text) for module, text in texts.items()})
    assert made.reached_from("quantc.rewrite.words:drop", HOMES, TABLES, DOORS) == set()
    assert made.reached_from("quantc.rewrite.words:add", HOMES, TABLES, DOORS) == {"quantc.verbs.lower:lower"}


# -- node.meta -----------------------------------------------------------------------------------------------------


def is_val(key: ast.AST | None) -> bool:
    return isinstance(key, ast.Constant) and key.value == "val"


def is_copy(value: ast.AST) -> bool:
    """True for metadata copied whole, `val` replaced or not."""
    if isinstance(value, ast.Dict):
        return all(key is None or is_val(key) for key in value.keys)
    return isinstance(value, ast.Call) and ast.unparse(value.func) in ("dict", "copy.copy")


def odd_meta(tree: ast.AST) -> Iterator[str]:
    """Uses of `meta` of nodes that concern more than `val`, but for copies of the whole."""
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Attribute) and node.attr == "meta"):
            continue
        above, key = parents[node], None
        if is_copy(above.value if isinstance(above, ast.Assign) else above):
            continue
        if isinstance(above, ast.Subscript):
            key = above.slice
        elif isinstance(above, ast.Attribute) and isinstance(call := parents[above], ast.Call) and call.args:
            key = call.args[0]
        elif isinstance(above, ast.Compare):
            key = above.left
        if not is_val(key):
            yield ast.unparse(above)


def test_no_fact_goes_by_the_metadata_of_nodes() -> None:
    found = {}
    for module, tree in engine_trees().items():
        uses = [*odd_meta(tree)]
        if uses and not f"{module}.".startswith(("quantc.capture.", "quantc.flows.")):
            found[module] = uses
    assert not {module: uses for module, uses in found.items() if module not in META}, "use a typed side table"
    assert set(META) <= set(found), "what has gone from the code goes from the list"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("x = node.meta['val']; node.meta.get('val'); 'val' in node.meta; node.meta.pop('val', None)", 0),
        ("node.meta['custom'] = 1", 1),
        ("node.meta[KEY]", 1),
        ("node.meta = dict(other.meta); node.meta = {**other.meta, 'val': 1}", 0),
        ("node.meta = {**other.meta, KEY: 1}", 2),
        ("KEY in node.meta", 1),
        ("node.meta.setdefault('key', 1)", 1),
    ],
)
def test_odd_keys_are_seen(text: str, count: int) -> None:
    assert len([*odd_meta(ast.parse(text))]) == count
