"""The command `quantc explain`. Its dependencies are imported lazily, so that other commands start without them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantc.cli.options import CaptureMethod, Json, MethodOption, ModeOption, Technique, print_json
from quantc.errors import LoadError
from quantc.support.terminal import Screen

if TYPE_CHECKING:
    from quantc.inspect.explain import NodeExplanation
    from quantc.ir.program import Program
    from quantc.patterns.explain_match import Explanation as TableExplanation
    from quantc.patterns.table import RuleTable

FUSIONS = "quantc.patterns.fusions:FUSIONS"


def explain(
    source: Annotated[str, typer.Argument(help="A .qc or .pt2 file, a .txt dump, or package.module:factory.")],
    node: Annotated[
        str,
        typer.Argument(help="The name of a node, as `quantc inspect --format text` shows it, or the path of a module."),
    ],
    table: Annotated[
        str | None, typer.Option(help=f"A rule table; by default {FUSIONS}.", metavar="MODULE:NAME")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="Prepare the program for this backend first.")] = None,
    mode: ModeOption = Technique.static,
    method: MethodOption = CaptureMethod.auto,
    as_json: Json = False,
) -> None:
    """List the rules tried at a node, those that matched, and why the others refused.

    With a backend, or for a prepared program: the verdict on the node, and the smallest change that would let a rule
    claim it.
    """
    from quantc.cli.model_source import load
    from quantc.inspect.explain import folded_into
    from quantc.ir.program import Stage

    program = load(source, method.value)
    is_table = table is not None or (backend is None and program.stage < Stage.ANNOTATED)
    if is_table:
        explanation: TableExplanation | NodeExplanation = _table(table, backend).explain(program, node)
    else:
        prepared = _prepare_for(program, backend, mode)
        if (error := folded_into(program, prepared, node)) is not None:
            raise error
        explanation = prepared.explain(node)
    if as_json:
        print_json(json.loads(explanation.to_json()))
        return
    Screen().text(str(explanation))


def _prepare_for(program: Program, backend: str | None, mode: Technique) -> Program:
    """The program as a backend would have it; itself if no backend is given."""
    from quantc.annotate.quantizer import mode_config, quantizer_of
    from quantc.verbs.prepare import prepare

    if backend is None:
        return program
    config = None if mode is Technique.static else mode_config(quantizer_of(backend), mode.value)
    return prepare(program, backend, config=config, allow_empty=True)


def _table(table: str | None, backend: str | None) -> RuleTable:
    from quantc.cli.model_source import import_object
    from quantc.patterns.table import RuleTable
    from quantc.pipeline.registry import BACKENDS

    if table is not None and backend is not None:
        raise typer.BadParameter("give --table or --backend, not both")
    found: Any = import_object(table or FUSIONS) if backend is None else BACKENDS[backend]
    found = getattr(found, "table", found)
    if not isinstance(found, RuleTable):
        raise LoadError(
            f"{backend or table} is a {type(found).__name__}, not a rule table",
            advice="give the place of a RuleTable: --table package.module:NAME",
        )
    return found
