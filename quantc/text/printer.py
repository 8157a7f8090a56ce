"""Text dumps of programs.

The "text" format is line by line, stable, and `quantc.parse` reads it back:

    program "Net" stage=canonical method=export mode=eval
      input %x : f32[2,3,8,8]
      const %c_weight = "c.weight" : f32[8,3,3,3] param #9f2c01ab
      %conv2d : f32[2,8,8,8] = conv2d(%x, %c_weight, padding=[1, 1])  # c : Conv2d @ model.py:12
      output (%conv2d,)

Operands come first, other arguments follow by name, and arguments that equal the default are omitted. Constants are
name, dtype, shape and a digest of their bytes. A nested graph is written `@name` where it is used and follows under its
own `graph @name` line. Optional lines: `in_spec` and `out_spec` (pytree specs of inputs and outputs, such as `((*,),
{"mask": *})`, unless they are plain positional tensors), `size s0 in 2..64` (a dynamic size), `inference_only "why"`,
`fixed_mode "why"` and `state` (a buffer that no node reads).

What was decided follows the graphs in a section `plan`: see `quantc.store.plan_text`.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx
from torch.utils import _pytree as pytree

from quantc.errors import QuantcError
from quantc.ir.program import DumpFormat, Program, attribute
from quantc.ir.signature import Signature
from quantc.text.digests import Constants, counter_targets
from quantc.text.graph_formats import dump_dot, dump_graphml, dump_json, dump_table, to_networkx
from quantc.text.literals import quote
from quantc.text.node_facts import select
from quantc.text.node_printer import GraphLines, at
from quantc.text.plan_section import plan_lines
from quantc.text.pytree_text import write_spec

INDENT = "  "


def dump(
    program: Program,
    format: DumpFormat = "text",  # noqa: A002 - as users know it
    only: str | None = None,
    plan: bool = True,
) -> str:
    """Print a program in one of five formats.

    "text" parses back; "table" is for reading; "json" for machines (keys in `quantc.text.graph_formats`); "dot" for
    Graphviz; "graphml" for graph editors. `only` prints a part: a module by its path, or nodes from one to another,
    `first..last`; as text, its lines. Without `plan` the text is that of the graphs alone.
    """
    match format:
        case "text":
            return "\n".join(_text(program, plan) if only is None else _lines(program, only)) + "\n"
        case "table":
            return dump_table(program, only)
        case "json":
            return dump_json(program, only)
        case "dot":
            return dump_dot(program, only)
        case "graphml":
            return dump_graphml(program, only)
        case _:
            raise QuantcError(
                f"unknown dump format {format!r}", advice='use "text", "table", "json", "dot" or "graphml"'
            )


def _lines(program: Program, only: str) -> Iterator[str]:
    """The lines of some nodes. They are no program: what they read is not among them."""
    kept, constants = select(program, only) or frozenset(), Constants(program)
    for path, graph in program.graphs():
        lines = GraphLines(program, path, graph, constants)
        yield from (lines.line(node) for node in graph.nodes if node in kept and not lines.is_inline(node))


def node_line(program: Program, node: fx.Node) -> str:
    """The line of one node in the text dump, for messages."""
    path = next((path for path, graph in program.graphs() if graph is node.graph), "")
    return GraphLines(program, path, node.graph, Constants(program)).line(node)


def default_in_spec(count: int) -> pytree.TreeSpec:
    """The pytree spec of inputs unless the text gives one: all positional."""
    return pytree.tree_structure(((0,) * count, {}))


def default_out_spec(count: int) -> pytree.TreeSpec:
    """The pytree spec of outputs unless the text gives one: a single value as it is, several as a tuple."""
    return pytree.tree_structure(0 if count == 1 else (0,) * count)


def output_count(graph: fx.Graph) -> int:
    """The number of values a graph returns."""
    for node in graph.find_nodes(op="output"):
        value = node.args[0] if node.args else ()
        return len(value) if isinstance(value, tuple | list) else 1
    return 0


def _text(program: Program, plan: bool) -> Iterator[str]:
    mode = "train" if program.training else "eval"
    method = program.method if program.method.isidentifier() else quote(program.method)
    yield f"program {quote(program.name)} stage={program.stage.label} method={method} mode={mode}"
    yield from _header(program)
    constants = Constants(program)
    for path, graph in program.graphs():
        if path:
            yield f"graph {at(path)}"
        lines = GraphLines(program, path, graph, constants)
        yield from (f"{INDENT}state {lines.constant(target)}" for target in counter_targets(program, graph))
        yield from (f"{INDENT}{lines.line(node)}" for node in graph.nodes if not lines.is_inline(node))
    yield from (f"graph {at(alias)} = {at(path)}" for alias, path in _aliases(program))
    if plan:
        yield from plan_lines(program)


def _header(program: Program) -> Iterator[str]:
    """The program-level lines."""
    yield from (f"{INDENT}inference_only {quote(reason)}" for reason in program.inference_only)
    if program.fixed_mode:
        yield f"{INDENT}fixed_mode {quote(program.fixed_mode)}"
    yield from (f"{INDENT}{line}" for line in _signature(program.signature, output_count(program.graph)))


def _signature(signature: Signature, outputs: int) -> Iterator[str]:
    if signature.in_spec != default_in_spec(len(signature.inputs)):
        yield f"in_spec {write_spec(signature.in_spec)}"
    if signature.out_spec != default_out_spec(outputs):
        yield f"out_spec {write_spec(signature.out_spec)}"
    for symbol, (low, high) in signature.ranges.items():
        auto = " auto" if symbol in signature.opened else ""
        yield f"size {symbol} in {low}..{'' if high is None else high}{auto}"


def _aliases(program: Program) -> Iterator[tuple[str, str]]:
    """Nested graphs with a second name: (second name, name it is printed under)."""
    printed = {id(graph): path for path, graph in program.graphs()}
    for path, graph in program.graphs():
        owner = graph.owning_module if path else program.root
        for target in dict.fromkeys(str(node.target) for node in graph.find_nodes(op="get_attr")):
            child = attribute(owner, target) if owner is not None else None
            name = f"{path}/{target}".lstrip("/")
            if isinstance(child, fx.GraphModule) and printed.get(id(child.graph), name) != name:
                yield name, printed[id(child.graph)]


def numbered(program: Program) -> str:
    """The text without the free choices of capture: node names, order of constants, origins, the model's name.

    Nodes are numbered in order; constants go by their names in the state dict (tied ones by their first). Two programs
    with the same text compute the same thing in the same canonical form.
    """
    constants = Constants(program)
    graph_names = {path: f"@{index}" for index, (path, _) in enumerate(program.graphs())}
    graph_names.update({alias: graph_names[path] for alias, path in _aliases(program)})
    rows = [
        f"program stage={program.stage.label} mode={'train' if program.training else 'eval'}",
        *_nameless_header(program),
    ]
    for path, graph in program.graphs():
        if path:
            rows.append(f"graph {graph_names[path]}")
        rows.extend(_numbered_graph(GraphLines(program, path, graph, constants), graph_names))
    return "\n".join(rows) + "\n"


def _nameless_header(program: Program) -> Iterator[str]:
    """The header without reasons, which name nodes and source lines."""
    if program.inference_only:
        yield f"{INDENT}inference_only"
    yield from (line for line in _header(program) if not line.startswith(f"{INDENT}inference_only"))


def _numbered_graph(lines: GraphLines, graph_names: dict[str, str]) -> Iterator[str]:
    states = {lines.state_name(target): target for target in counter_targets(lines.program, lines.graph)}
    body: list[str] = []
    count = 0
    for node in lines.graph.nodes:
        if node.op != "get_attr":
            keyword = {"placeholder": "input ", "output": "output"}.get(node.op, "")
            name = "" if node.op == "output" else f"%{count}"
            body.append(f"{INDENT}{keyword}{name}{_nameless(lines, node)}")
            lines.refs[node] = name
            count += 1
            continue
        target = str(node.target)
        nested = graph_names.get(f"{lines.path}/{target}".lstrip("/"))
        name = lines.state_name(target)
        lines.refs[node] = nested or f"${name}"
        if nested is None and node.users:
            states[name] = target
    for name, target in sorted(states.items()):
        yield f"{INDENT}const ${name}{lines.constant(target).removeprefix(quote(target)).partition(' tied=')[0]}"
    yield from body


def _nameless(lines: GraphLines, node: fx.Node) -> str:
    """The tail without the names of inputs and outputs."""
    if node.op == "placeholder":
        return lines.type_and_constant(node)
    if node.op == "output":
        return f" {lines.output(node)}"
    return lines.tail(node)


__all__ = ["dump", "node_line", "numbered", "to_networkx"]
