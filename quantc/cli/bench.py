"""The command `quantc bench`. Its dependencies are imported lazily, so that other commands start without them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantc.cli.error_output import STANDARD_OUTPUT
from quantc.cli.options import CaptureMethod, MethodOption
from quantc.files.atomic_file import write_text
from quantc.support.terminal import Screen

if TYPE_CHECKING:
    from quantc.bench.measure import Outcome
    from quantc.bench.models import Task
    from quantc.bench.race import Row

COLUMNS = ("model", "contender", "ms, best", "times eager", "SQNR, dB", "weights", "built in s", "note")


def bench(
    source: Annotated[
        str | None,
        typer.Argument(
            help="A model of yours: a .pt2 file or package.module:factory; without it, the built-in models."
        ),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help="A built-in model; may be repeated. By default all of them.", metavar="NAME"),
    ] = None,
    contender: Annotated[
        list[str] | None,
        typer.Option(help="A contender; may be repeated. By default all. The float model always runs.", metavar="NAME"),
    ] = None,
    rounds: Annotated[int, typer.Option(help="How often each contender has its turn.", min=1)] = 15,
    batch: Annotated[int | None, typer.Option(help="The batch size of built-in models.", min=1)] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Batches for SOURCE, as `quantc quantize` takes them.", metavar="FILE|MODULE:NAME"),
    ] = None,
    floor: Annotated[
        bool, typer.Option("--floor", help="Also the time of all ops alone, each on its best kernel.")
    ] = False,
    ops: Annotated[bool, typer.Option("--ops", help="Also a table of the ops, with the time of each alone.")] = False,
    to_json: Annotated[
        str | None,
        typer.Option("--json", help="Write one JSON document to a file, or - for standard output.", metavar="FILE|-"),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a bar chart to a .svg or .html file.")] = None,
    is_list: Annotated[bool, typer.Option("--list", help="List the models and contenders, and leave.")] = False,
    method: MethodOption = CaptureMethod.auto,
) -> None:
    """Benchmark quantized models against other tools, in one run: time, accuracy, size.

    All contenders take turns in one process, on one thread. One that cannot be built becomes a row with the reason.
    """
    from quantc.bench.chart import check_plot, write_plot
    from quantc.bench.contenders import chosen
    from quantc.bench.measure import measure

    if is_list:
        _show_list(Screen())
        return
    if plot is not None:
        check_plot(plot)
    contenders = chosen(contender)
    tasks = _tasks(source, model, batch, data, method)
    outcomes: list[Outcome] = []
    with _telling() as tell:
        for make in tasks:
            outcomes.append(measure(make(tell), contenders, rounds, tell=tell, with_floor=floor or ops))
            if to_json not in (None, STANDARD_OUTPUT):
                _write(Path(str(to_json)), outcomes, rounds)  # after each model: a long run may be broken off
    rows = [row for outcome in outcomes for row in outcome.rows]
    cells = [_cells(row) for row in rows]
    if plot is not None:
        write_plot(plot, rows, COLUMNS, cells)
    if to_json == STANDARD_OUTPUT:
        typer.echo(_document(outcomes, rounds))
        return
    screen = Screen()
    _show(screen, cells)
    _show_floors(screen, outcomes, with_ops=ops)
    for path in (to_json, plot):
        if path is not None:
            typer.echo(f"written to {path}", err=True)


def _tasks(
    source: str | None, names: list[str] | None, batch: int | None, data: str | None, method: CaptureMethod
) -> list[Callable[[Callable[[str], None]], Task]]:
    """Tasks to measure; each is made lazily, since models are large."""
    from quantc.bench.models import MODELS, task_of
    from quantc.cli.bench_task import own_task
    from quantc.errors import UnknownNameError, suggest

    def built_in(name: str) -> Callable[[Callable[[str], None]], Task]:
        def make(tell: Callable[[str], None]) -> Task:
            tell(f"{name}: making the model")
            return task_of(name, batch)

        return make

    def own(tell: Callable[[str], None]) -> Task:
        task, notes = own_task(str(source), data, method.value)
        for note in notes:
            typer.echo(f"note: {note}", err=True)
        return task

    if source is not None:
        for option, value in (("--model", names), ("--batch", batch)):
            if value:
                raise typer.BadParameter("it is for the built-in models, and SOURCE is another", param_hint=option)
        return [own]
    if data is not None:
        raise typer.BadParameter("the built-in models have their own data; give SOURCE too", param_hint="--data")
    for name in names or ():
        if name not in MODELS:
            raise UnknownNameError(
                f"unknown model {name!r}", where="--model", advice=suggest(name, MODELS, noun="models")
            )
    return [built_in(name) for name in MODELS if not names or name in names]


@contextmanager
def _telling() -> Iterator[Callable[[str], None]]:
    """Progress messages: one changing line on a terminal, separate lines in a pipe.

    Nothing is animated in between: a spinner thread would be timed along with the contenders.
    """
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda text: console.out(text, highlight=False)
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield lambda text: live.update(Text(text), refresh=True)


# -- what is shown ---------------------------------------------------------------------------------------------


def _show_list(screen: Screen) -> None:
    from quantc.bench.contenders import CONTENDERS
    from quantc.bench.models import MODELS

    screen.table(
        "models", ("model", "batch", "what it is"), [(name, str(m.batch), m.told) for name, m in MODELS.items()]
    )
    screen.table(
        "contenders",
        ("contender", "what it is", "missing"),
        [(name, each.told, ", ".join(each.missing())) for name, each in CONTENDERS.items()],
    )


def _cells(row: Row) -> tuple[str, ...]:
    from quantc.support.sqnr import format_sqnr

    numbers = ((row.milliseconds, "8.2f"), (row.speed, "6.2f"), (row.size, "5.3f"), (row.build_seconds, "6.1f"))
    best, speed, size, seconds = ("" if value is None else format(value, form) for value, form in numbers)
    return row.model, row.contender, best, speed, format_sqnr(row.sqnr).rjust(5), size, seconds, row.reason


def _show(screen: Screen, cells: Sequence[tuple[str, ...]]) -> None:
    """The table; the column of notes only if there are any."""
    width = len(COLUMNS) if any(row[-1] for row in cells) else len(COLUMNS) - 1
    screen.table("one thread, ratios of the same rounds", COLUMNS[:width], [row[:width] for row in cells])


def _show_floors(screen: Screen, outcomes: Sequence[Outcome], *, with_ops: bool) -> None:
    from quantc.bench.floor import COLUMNS as OPS

    found = [(outcome.rows[0].model, name, floor) for outcome in outcomes for name, floor in outcome.floors.items()]
    if not found:
        return
    screen.table(
        "the ops alone, each on its best kernel",
        ("model", "contender", "floor, ms", "whole, ms", "floor / whole"),
        [
            (model, name, f"{floor.milliseconds:.2f}", f"{floor.whole_milliseconds:.2f}", f"{floor.share:.2f}")
            for model, name, floor in found
        ],
    )
    for model, name, floor in found if with_ops else ():
        screen.table(f"{model}, {name}: {floor}", OPS, floor.rows())


def _document(outcomes: Sequence[Outcome], rounds: int) -> str:
    import torch

    from quantc.targets.kernels.tuning import processor

    floors: list[dict[str, Any]] = []
    for outcome in outcomes:
        model = outcome.rows[0].model
        floors += [{"model": model, "contender": name, **each.to_data()} for name, each in outcome.floors.items()]
    document = {
        "quantc": version("quantc"),
        "torch": torch.__version__,
        "processor": processor(),
        "threads": 1,
        "rounds": rounds,
        "rows": [row.to_data() for outcome in outcomes for row in outcome.rows],
        "floors": floors,
    }
    return json.dumps(document, indent=2, ensure_ascii=False)


def _write(path: Path, outcomes: Sequence[Outcome], rounds: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, _document(outcomes, rounds) + "\n")
