"""Which definitions of the engine name which others: functions, classes and tables, read from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

from tests.support.check_types import source_files
from tests.support.paths import ROOT

OUTSIDE = ("tests", "benchmarks", "examples")


@cache
def engine_trees() -> dict[str, ast.Module]:
    """The source of the engine, by the name of the module."""
    found = {}
    for path in source_files():
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[0] in OUTSIDE:
            continue
        parts = parts if parts[0] == "quantc" else ("quantc", *parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text(encoding="utf-8"))
    return found


@dataclass
class References:
    """Definitions as `module:name`; what stands beside them in a module belongs to `module:`."""

    bodies: dict[str, list[ast.stmt]] = field(default_factory=dict)
    named_by: dict[str, set[str]] = field(default_factory=dict)
    """By a definition: those that name it."""
    decorators: dict[str, set[str]] = field(default_factory=dict)
    """By a definition: those it is decorated with."""

    @staticmethod
    def of(trees: dict[str, ast.Module]) -> References:
        made = References()
        for module, tree in trees.items():
            for statement in (statement for statement in tree.body if not _is_type(statement)):
                for name in _defined(statement) or [""]:
                    made.bodies.setdefault(f"{module}:{name}", []).append(statement)
        imported = {module: _imports(tree, set(trees)) for module, tree in trees.items()}
        for place, statements in made.bodies.items():
            module = place.partition(":")[0]
            for target in _targets(_names(statements), module, imported[module]):
                if target in made.bodies and target != place:
                    made.named_by.setdefault(target, set()).add(place)
            lists = [getattr(statement, "decorator_list", []) for statement in statements]
            made.decorators[place] = {
                *_targets(_names([each for found in lists for each in found]), module, imported[module])
            }
        return made

    def reached_from(
        self, place: str, stops: tuple[str, ...], tables: tuple[str, ...], doors: tuple[str, ...]
    ) -> set[str]:
        """Definitions that lead to one and that nothing names, or that are one of `doors`. The walk ends where a name
        begins with one of `stops`, and at rows that decorators enter into `tables`."""
        found: set[str] = set()
        ends = {place for table in tables for place in self.named_by.get(table, ()) if place.endswith(":")}
        ends |= {place for place, found in self.decorators.items() if not found.isdisjoint(tables)}
        seen, pending = {place}, [place]
        while pending:
            current = pending.pop()
            if current.startswith(stops) or current in ends:
                continue
            if current in doors:
                found.add(current)
                continue
            above = self.named_by.get(current, set())
            if not above:
                found.add(current)
            pending += above - seen
            seen |= above
        return found


def _is_type(statement: ast.stmt) -> bool:
    """True for names of function types, which call nothing."""
    value = getattr(statement, "value", None)
    return isinstance(value, ast.Subscript) and ast.unparse(value.value) == "Callable"


def _defined(statement: ast.stmt) -> list[str]:
    match statement:
        case ast.FunctionDef() | ast.ClassDef() | ast.AsyncFunctionDef():
            return [statement.name]
        case ast.Assign():
            return [target.id for target in statement.targets if isinstance(target, ast.Name)]
        case ast.AnnAssign() if isinstance(statement.target, ast.Name):
            return [statement.target.id]
    return []


def _imports(tree: ast.Module, modules: set[str]) -> dict[str, str]:
    """By a name that is imported, inside functions too: the definition, or the module, that it stands for."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found[alias.asname or alias.name] = whole if whole in modules else f"{node.module}:{alias.name}"
    return found


def _targets(names: Iterator[str], module: str, imported: dict[str, str]) -> Iterator[str]:
    """The definitions that names of a module stand for."""
    for name in names:
        owner, _, leaf = name.partition(".")
        target = imported.get(owner, f"{module}:{owner}")
        yield target if ":" in target else f"{target}:{leaf}"


def _names(statements: Sequence[ast.AST]) -> Iterator[str]:
    """Names, and attributes of names, dotted; not those in annotations, which call nothing."""
    pending: list[ast.AST] = [*statements]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}"
        for name, value in ast.iter_fields(node):
            if name not in ("annotation", "returns"):
                children = value if isinstance(value, list) else [value]
                pending += [child for child in children if isinstance(child, ast.AST)]
