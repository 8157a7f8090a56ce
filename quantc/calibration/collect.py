"""Statistics that a calibration collects beside ranges, and their cost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar, Self

from pydantic import Field, StrictInt, StrictStr
from torch import fx

from quantc.calibration.layer_inputs import LayerInput, layer_inputs, lookups
from quantc.errors import CalibrationError, SpecError, suggest
from quantc.ir.mac_count import example_sizes, products
from quantc.ir.program import Program
from quantc.ir.site_index import Places
from quantc.observe.outer_products import cells
from quantc.observe.reservoir import DEFAULT_SIZE
from quantc.observe.statistic_registry import STATISTICS
from quantc.spec.spec import Option
from quantc.spec.statistic import Statistic
from quantc.support.option_text import read
from quantc.support.validated import Frozen

RECOVER = "gram,extremes,tokens"
"""Statistics for the passes of `qc.recover`: sums, sums of products, the range of each channel, and counts of indices."""
MAX_BYTES = 2 * 2**30
OF_ROWS = ("moments", "gram", "reservoir")
"""Statistics of the rows that layers read."""
COLLECTED = (*OF_ROWS, "extremes", "fisher", "tokens")
"""Statistics that a calibration can collect; a cross-Gram takes the quantized model too."""


class Collect(Frozen, frozen=True):
    """Statistics to collect, and the limits of it."""

    noun: ClassVar[str] = "choice of what to collect"

    statistics: StrictStr = "gram"
    """Names and options, as in `gram,reservoir{rows=64}`; "recover" for all that `qc.recover` needs."""
    without: tuple[StrictStr, ...] = ()
    """Layers to leave out: names of nodes or modules, or globs."""
    max_bytes: StrictInt = Field(default=MAX_BYTES, gt=0)
    """Memory that the statistics may take."""
    effort: float = Field(default=0.5, gt=0)
    """Multiply-adds for a Gram, relative to those of the layers that read the tensor. It decides how many of the rows
    are taken, but for a number of channels; the others are left out."""

    def why_not(self) -> str | None:
        for name, options in self.kinds().items():
            if name not in COLLECTED:
                return f"statistics: {suggest(name, COLLECTED, noun='statistics')} (given: {name!r})"
            STATISTICS[name].empty(options)
        return None

    def kinds(self) -> dict[str, dict[str, Option]]:
        """Options by the name of the statistic."""
        calls = read(RECOVER if self.statistics == "recover" else self.statistics)
        return {call.name: {option.name: option.value for option in call.options} for call in calls}  # type: ignore[misc]

    @classmethod
    def of(cls, value: Collect | str | Sequence[str] | None) -> Self | None:
        """None for nothing; `recover`, names with options as text or a list of them."""
        if value is None or isinstance(value, cls):
            return value
        text = value if isinstance(value, str) else ",".join(value)  # type: ignore[arg-type]
        if not text:
            return None
        return cls(statistics=text)


@dataclass(frozen=True, slots=True)
class Tap:
    """One statistic of one tensor."""

    kind: type[Statistic]
    options: Mapping[str, Option]
    value: fx.Node
    site: str
    readers: tuple[fx.Node, ...]
    rows: LayerInput | None = None
    """None for statistics of the tensor as it is."""
    bytes: int = 0
    """Memory of both halves."""
    axis: int | None = None
    """The axis of the channels, for statistics of the tensor by channel."""

    @property
    def name(self) -> str:
        """Its key in the plan and in files."""
        if self.axis is not None and self.rows is None:
            return key_of(self.kind.statistics, channels_of(self.site, self.axis))
        return key_of(self.kind.statistics, self.site if self.rows is None else self.rows.name)


def key_of(kind: str, tensor: str) -> str:
    """The key of a statistic, from its name and that of a layer's input."""
    return f"{kind} {tensor}"


def channels_of(site: str, axis: int) -> str:
    """The name of the channels of a tensor, in keys of statistics."""
    return f"{site} axis {axis}"


@dataclass(frozen=True)
class Collection:
    """Statistics to collect from a program, and their cost."""

    taps: tuple[Tap, ...]
    effort: float
    bytes: int
    work: float | None
    """Multiply-adds in float64, relative to those of the layers; None if sizes are unknown."""

    def __str__(self) -> str:
        kinds = ", ".join(dict.fromkeys(tap.kind.statistics for tap in self.taps))
        tensors = len({tap.site for tap in self.taps})
        work = "" if not self.work else f", {self.work:.2f} x the multiply-adds of their layers, in float64"
        if any(tap.kind.statistics == "fisher" for tap in self.taps):
            work += ", and a backward pass"
        return f"{kinds} of {tensors} tensors: {gigabytes(self.bytes)}{work}"


def share_of(rows: LayerInput, effort: float) -> float:
    """The share of the rows that a Gram of this effort takes."""
    return min(1.0, effort * rows.outputs / rows.width)


def collection_of(program: Program, what: Collect) -> Collection:
    """The statistics to collect from a program. CalibrationError if they take more memory than allowed, or none is left."""
    left_out = _left_out(program, what.without)
    kinds = what.kinds()
    taps = [tap for tap in _taps(program, kinds) if not set(tap.readers) <= left_out]
    if not taps:
        raise CalibrationError(
            f"there is nothing to collect {what.statistics} of",
            where=program.name,
            advice="prepare with quantized linears, convolutions or embeddings; or leave out collect=",
        )
    total = sum(tap.bytes for tap in taps)
    found = Collection(tuple(taps), what.effort, total, _work(program, taps, what.effort))
    if total > what.max_bytes:
        raise _too_much(program, found, what)
    return found


def _taps(program: Program, kinds: Mapping[str, Mapping[str, Option]]) -> list[Tap]:
    found: list[Tap] = []
    inputs = layer_inputs(program)
    for name, options in kinds.items():
        kind = STATISTICS[name]
        if name in OF_ROWS:
            found += (
                Tap(kind, options, rows.value, rows.site, rows.readers, rows, _bytes(name, rows, options))
                for rows in inputs
            )
        elif name == "extremes":
            found += _channels(kind, options, inputs)
        elif name == "tokens":
            found += _lookups(program, kind, options)
        else:
            places = Places(program)
            found += (
                Tap(kind, options, node, str(places.out(node)), (node,), None, 48 * rows.groups * rows.outputs)
                for rows in inputs
                for node in rows.readers
            )
    return found


def _channels(kind: type[Statistic], options: Mapping[str, Option], inputs: Sequence[LayerInput]) -> Iterator[Tap]:
    """The channels of the tensors that layers read, each tensor once."""
    found: dict[tuple[str, int], Tap] = {}
    for rows in inputs:
        inside = 1 if rows.window is None else math.prod(rows.window.kernel)
        size = 16 * rows.groups * rows.width // inside
        readers = (*(known.readers if (known := found.get((rows.site, rows.axis))) else ()), *rows.readers)
        found[rows.site, rows.axis] = Tap(kind, options, rows.value, rows.site, readers, None, size, rows.axis)
    return iter(found.values())


def _lookups(program: Program, kind: type[Statistic], options: Mapping[str, Option]) -> list[Tap]:
    found: dict[str, Tap] = {}
    for rows in lookups(program):
        known = found.get(rows.site)
        readers = rows.readers if known is None else known.readers + rows.readers
        size = max(16 * rows.groups, 0 if known is None else known.bytes)
        found[rows.site] = Tap(kind, options, rows.value, rows.site, readers, None, size)
    return list(found.values())


def _bytes(name: str, rows: LayerInput, options: Mapping[str, Option]) -> int:
    """Memory of both halves of a statistic: exact, but for the counters."""
    channels = rows.groups * rows.width
    sums = 20 * channels
    if name == "moments":
        return 2 * 2 * sums
    if name == "gram":
        return 2 * (16 * rows.groups * cells(rows.width) + 4 * channels + sums)
    size = options.get("rows", DEFAULT_SIZE)
    return 2 * int(size) * (4 * channels + 8)


def _work(program: Program, taps: Sequence[Tap], effort: float) -> float | None:
    sizes = example_sizes(program)
    own, more = 0, 0.0
    for tap in taps:
        if tap.rows is None or tap.kind.statistics != "gram":
            continue
        counts = [products(node, sizes) for node in tap.rows.readers]
        if any(count is None for count in counts):
            return None
        layer = sum(row.count for count in counts if count is not None for row in count)
        own += layer
        # half of a symmetric product, of a row of `width` for each `outputs` sums of `width` products
        total = layer // (tap.rows.groups * tap.rows.outputs * tap.rows.width)
        taken = tap.rows.kept(total, share_of(tap.rows, effort))
        more += taken * tap.rows.groups * tap.rows.width**2 / 2
    return more / own if own else 0.0


def _left_out(program: Program, without: Sequence[str]) -> set[fx.Node]:
    """The layers that the selectors name. SpecError for one that names none."""
    found: set[fx.Node] = set()
    names = {node: (node.name, _module(program, node)) for node in program.nodes() if node.op == "call_function"}
    for selector in without:
        chosen = {
            node
            for node, (name, path) in names.items()
            if fnmatchcase(name, selector) or fnmatchcase(path, selector) or path.startswith(f"{selector}.")
        }
        if not chosen:
            known = sorted({text for pair in names.values() for text in pair if text})
            raise SpecError(
                f"without: {selector!r} names no layer", where="collect", advice=suggest(selector, known, noun="names")
            )
        found |= chosen
    return found


def _module(program: Program, node: fx.Node) -> str:
    origin = program.origins.get(node)
    return origin.module_path if origin is not None else ""


def _too_much(program: Program, found: Collection, what: Collect) -> CalibrationError:
    """Names the largest tensors: without those, the rest fits."""
    largest = sorted(found.taps, key=lambda tap: -tap.bytes)
    total, out = found.bytes, []
    for tap in largest:
        if total <= what.max_bytes:
            break
        total -= tap.bytes
        out.append(tap)
    names = [reader.name for tap in out for reader in tap.readers]
    return CalibrationError(
        f"collecting {found} is more than the limit of {gigabytes(what.max_bytes)}",
        where=", ".join(f"{program.describe(tap.readers[0])}: {gigabytes(tap.bytes)}" for tap in out[:5]),
        advice=f"raise the limit, Collect(max_bytes={found.bytes}), or leave out the largest: "
        f"Collect(statistics={what.statistics!r}, without={tuple(dict.fromkeys(names))!r})",
    )


def gigabytes(count: int) -> str:
    """`1.4 GB`, `20.1 MB` or `3.2 kB`."""
    for unit, size in (("GB", 10**9), ("MB", 10**6)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1000:.1f} kB"


__all__ = [
    "COLLECTED",
    "MAX_BYTES",
    "RECOVER",
    "Collect",
    "Collection",
    "Tap",
    "channels_of",
    "collection_of",
    "gigabytes",
    "key_of",
]
