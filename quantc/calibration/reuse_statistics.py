"""Reuse of saved statistics for the same program, prepared in any compatible way."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quantc.calibration.accumulator import Whole
from quantc.calibration.calibration_report import CalibrationReport
from quantc.calibration.checkpoint import program_digest
from quantc.calibration.graph_observers import show_observers
from quantc.calibration.loop import finish
from quantc.calibration.observed_tensors import data_groups, observed_sites, observed_tensors, same_elements
from quantc.errors import CalibrationError, LoadError, ObservationError, QuantcError
from quantc.ir.program import Program
from quantc.ir.site_index import Places
from quantc.observe.auto import Auto
from quantc.observe.fixed_qparams import FixedQParams
from quantc.observe.histogram import Histogram
from quantc.observe.minmax import MinMax, WithExtremes
from quantc.observe.moving_average import MovingAverage
from quantc.observe.observation_registry import start
from quantc.observe.recording import Recording
from quantc.observe.store import Statistics
from quantc.spec.observation import Observation, check_spec
from quantc.spec.spec import QuantSpec

Saved = Statistics | str | os.PathLike[str]


def use_statistics(prepared: Program, statistics: Saved) -> CalibrationReport:
    """Calibrate a prepared program with saved statistics, in place of those it has.

    `statistics` is a file written by `report.statistics.save(path)`, or the statistics themselves. They must be of the
    same program; but it may be prepared for another backend or config, as long as the observations suffice: a histogram
    gives every range method and bit width, min-max statistics give min-max ranges alone.
    """
    return _use(prepared, _load(statistics))


def merge_statistics(prepared: Program, shards: Iterable[Saved]) -> CalibrationReport:
    """Calibrate a prepared program with statistics of several shards of the data, collected separately.

    The result has the same bits as one calibration over all of the data, in any order. Moving averages are refused:
    they depend on that order.
    """
    parts = [_load(shard) for shard in shards]
    if not parts:
        raise CalibrationError("no statistics to merge", where=prepared.name, advice="give at least one")
    merged = parts[0]
    for part in parts[1:]:
        if part.notes.get("plan") != merged.notes.get("plan"):
            raise CalibrationError(
                "these statistics were not collected in the same way: they are of different programs or plans",
                where=prepared.name,
                advice="prepare the model in the same way for every part of the data",
            )
        if part.collected.keys() != merged.collected.keys():
            raise CalibrationError(
                "these statistics were not collected in the same way: some have "
                f"{min(part.collected.keys() ^ merged.collected.keys())!r}, and some have not",
                where=prepared.name,
                advice="calibrate every part of the data with the same collect=",
            )
        merged = merged.merge(part)
    counts: list[Any] = [part.notes.get("samples") for part in parts]
    notes = {
        **merged.notes,
        "batches": sum(_batches(part) for part in parts),
        "samples": None if None in counts else sum(counts),
    }
    return _use(prepared, Statistics(merged.sites, notes, merged.collected))


def _load(saved: Saved) -> Statistics:
    return saved if isinstance(saved, Statistics) else Statistics.load(Path(saved))


def _use(prepared: Program, saved: Statistics) -> CalibrationReport:
    if saved.notes.get("program") != program_digest(prepared):
        raise CalibrationError(
            "these statistics are of another program: its ops or its weights differ",
            where=prepared.name,
            advice="calibrate this program; statistics serve the very model they were collected from",
        )
    index = _Index(saved)
    wanted = _known_sites(prepared, index)
    found = {group.name: index.find(group.name, wanted[group.name], spec) for group, spec in data_groups(prepared)}
    prepared.plan.statistics = found
    prepared.plan.batches = _batches(saved)
    prepared.plan.collected = dict(saved.collected)
    show_observers(prepared)
    samples: Any = saved.notes.get("samples")
    whole = Whole(found, prepared.plan.batches, samples)
    return finish(prepared, whole, 0.0, ["from statistics that were collected before"])


def _known_sites(prepared: Program, index: _Index) -> dict[str, list[str]]:
    """Observed tensors of each group; for a view of one whose statistics were saved, that one."""
    places = Places(prepared)
    views = {str(places.out(node)): node for node in observed_tensors(prepared)}

    def known(tensor: str) -> str:
        source = str(places.out(same_elements(views[tensor])))
        return source if tensor not in index.of_tensor and source in index.of_tensor else tensor

    return {name: [known(tensor) for tensor in tensors] for name, tensors in observed_sites(prepared).items()}


class _Index:
    """Saved statistics by the tensors they are of."""

    def __init__(self, saved: Statistics) -> None:
        self.saved = saved
        self.members = _members(saved)
        self.of_tensor: dict[str, list[str]] = {}
        for name, tensors in self.members.items():
            for tensor in tensors:
                self.of_tensor.setdefault(tensor, []).append(name)

    def find(self, group: str, tensors: Sequence[str], spec: QuantSpec) -> Observation:
        """The statistics of just these tensors: those of a group that was saved, or of several together."""
        chosen: dict[str, None] = {}
        for tensor in tensors:
            inside = [name for name in self.of_tensor.get(tensor, []) if self.members[name] <= set(tensors)]
            if not inside:
                raise self._missing(group, tensor, set(tensors))
            chosen[self._fitting(inside, spec)] = None
        total = start(spec)
        for number, name in enumerate(chosen):
            own = derive_observation(self.saved.sites[name], spec, where=group)
            total = total.merge(own) if number else own
        return total

    def _fitting(self, names: Sequence[str], spec: QuantSpec) -> str:
        """Of several groups, one that can give the requested statistics; if none can, the first, whose refusal gives the reason."""
        return next((name for name in names if why_not_derived(self.saved.sites[name], spec) is None), names[0])

    def _missing(self, group: str, tensor: str, wanted: set[str]) -> CalibrationError:
        names = self.of_tensor.get(tensor, [])
        if not names:
            advice = "calibrate this program, or leave the tensor float"
            return CalibrationError(f"{tensor} was not observed", where=group, advice=advice)
        others = ", ".join(sorted(self.members[names[0]] - wanted))
        return CalibrationError(
            f"{tensor} was observed together with {others}, which no longer share its scale",
            where=group,
            advice="calibrate this program",
        )


def _members(saved: Statistics) -> dict[str, frozenset[str]]:
    groups = saved.notes.get("groups")
    if not isinstance(groups, Mapping) or set(groups) != set(saved.sites):
        raise LoadError(
            "the note 'groups' does not list the tensors of each site",
            advice="give statistics that qc.calibrate collected",
        )
    return {str(name): frozenset(map(str, tensors)) for name, tensors in groups.items()}


def _batches(saved: Statistics) -> int:
    count = saved.notes.get("batches")
    if type(count) is not int or count < 0:
        raise LoadError(
            f"the note 'batches' is {count!r}, not a count", advice="give statistics that qc.calibrate collected"
        )
    return count


def derive_observation(observation: Observation, spec: QuantSpec, *, where: str = "") -> Observation:
    """The observation that a spec asks for, computed from another. ObservationError if that one does not determine
    it."""
    wanted = start(spec)
    if isinstance(observation, Recording):
        for tensor in observation.tensors:
            wanted.update(tensor, where=where)
        return wanted
    check_spec(observation, spec, where)
    if isinstance(wanted, FixedQParams):
        wanted.seen = observation.seen
        return wanted
    if isinstance(wanted, MovingAverage) and isinstance(observation, MovingAverage) and wanted.rate != observation.rate:
        raise ObservationError(
            f"an average that moved by {observation.rate} cannot give one that moves by {wanted.rate}",
            where=where or None,
            advice="calibrate again with this spec",
        )
    if type(observation) is type(wanted):
        return observation
    if isinstance(wanted, Histogram) and isinstance(observation, Auto):
        return observation.whole()
    if isinstance(wanted, MinMax) and isinstance(observation, WithExtremes):
        return observation.extremes
    raise ObservationError(
        f"{observation.statistics} statistics cannot give {spec.observe} ranges",
        where=where or None,
        advice="calibrate again with this spec; histograms (mse, percentile, entropy) serve every range method",
    )


def why_not_derived(observation: Observation, spec: QuantSpec) -> str | None:
    """The reason why the observation of a spec cannot be derived from another; None if it can."""
    try:
        derive_observation(observation, spec)
    except QuantcError as error:
        return error.what
    return None
