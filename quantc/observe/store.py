"""Statistics in a sealed tensor file (`quantc.files.sealed_tensors`), with a JSON document as one of its tensors.
Reading it executes nothing.

    {"notes": {...}, "sites": {"conv2d:out0": {"statistics": "minmax", "share": {"kind": "per-tensor"},
     "values": {"seen": 64, "non_finite": 0}, "tensors": ["high", "low"]}}}

A tensor `high` of that site is stored under `conv2d:out0|high`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError
from torch import Tensor

from quantc.errors import LoadError, ObservationError, PluginError, QuantcError, SaveError, SpecError, UnknownNameError
from quantc.files import sealed_tensors
from quantc.files.endings import check_ending
from quantc.files.regular_file import as_path
from quantc.files.sealed_tensors import FileKind
from quantc.observe.observation_registry import OBSERVATIONS
from quantc.observe.statistic_registry import STATISTICS as KINDS
from quantc.spec.formats import Granularity
from quantc.spec.halves import Halves
from quantc.spec.numerics import QParams
from quantc.spec.observation import Observation, Order, State
from quantc.spec.spec import Option, QuantSpec
from quantc.support.validated import faults_of

ADVICE = "give a file that quantc wrote, or calibrate again"
VERSION = 2
STATISTICS = FileKind("quantc.statistics", (VERSION,), "statistics", ADVICE, unsealed=frozenset({1}))
DOCUMENT = "document"
COLLECTED = "collected/"
M = TypeVar("M", Observation, Halves)


class SiteRecord(BaseModel):
    """An observation without its tensors."""

    model_config = ConfigDict(extra="forbid")
    statistics: str
    share: Granularity
    values: dict[str, JsonValue]
    tensors: list[str]

    @staticmethod
    def of(observation: Observation) -> tuple[SiteRecord, Mapping[str, Tensor]]:
        """The record of an observation, and its tensors."""
        if isinstance(observation, Withheld):
            return observation.record, observation.tensors
        state = observation.to_state()
        record = SiteRecord(
            statistics=observation.statistics,
            share=observation.share,
            values=dict(state.values),
            tensors=sorted(state.tensors),
        )
        return record, state.tensors

    def restore(self, tensors: Mapping[str, Tensor], where: str) -> Observation:
        """Restore the observation from its tensors. LoadError, naming the field, if they do not fit."""
        for key in self.tensors:
            if key not in tensors:
                raise LoadError(f"the tensor {key!r} is missing", where=where, advice=ADVICE)
        state = State({key: tensors[key] for key in self.tensors}, self.values)
        try:
            return OBSERVATIONS[self.statistics].from_state(self.share, state)
        except (UnknownNameError, PluginError) as error:
            raise LoadError(f"the field 'statistics': {error.what}", where=where, advice=error.advice) from error
        except QuantcError as error:
            raise LoadError(error.what, where=where, advice=ADVICE) from error


class HalvesRecord(BaseModel):
    """A statistic of both halves without its tensors."""

    model_config = ConfigDict(extra="forbid")
    statistics: str
    values: dict[str, JsonValue]
    tensors: list[str]

    @staticmethod
    def of(halves: Halves) -> tuple[HalvesRecord, Mapping[str, Tensor]]:
        """The record, and the tensors."""
        state = halves.to_state()
        record = HalvesRecord(statistics=halves.statistics, values=dict(state.values), tensors=sorted(state.tensors))
        return record, state.tensors

    def restore(self, tensors: Mapping[str, Tensor], where: str) -> Halves:
        """Restore both halves from their tensors. LoadError, naming the field, if they do not fit."""
        for key in self.tensors:
            if key not in tensors:
                raise LoadError(f"the tensor {key!r} is missing", where=where, advice=ADVICE)
        try:
            return Halves.from_state(KINDS[self.statistics], State(tensors, self.values))
        except (UnknownNameError, PluginError) as error:
            raise LoadError(f"the field 'statistics': {error.what}", where=where, advice=error.advice) from error
        except QuantcError as error:
            raise LoadError(error.what, where=where, advice=ADVICE) from error


@dataclass(frozen=True)
class Withheld:
    """Statistics of which there is a record and no numbers, as in a program parsed without them: they can be written
    again, and nothing else."""

    record: SiteRecord
    tensors: Mapping[str, Tensor]
    """On the meta device."""
    statistics: ClassVar[str] = "withheld"
    order: ClassVar[Order] = Order.FREE

    @classmethod
    def empty(cls, share: Granularity, options: Mapping[str, Option]) -> Self:
        raise SpecError("nothing is observed by statistics that are withheld", advice="observe with minmax")

    @property
    def share(self) -> Granularity:
        return self.record.share

    @property
    def seen(self) -> int:
        return self._count("seen")

    @property
    def non_finite(self) -> int:
        return self._count("non_finite")

    def _count(self, name: str) -> int:
        found = self.record.values.get(name)
        return found if isinstance(found, int) else 0

    def update(self, x: Tensor, *, where: str = "") -> None:
        raise self._refusal(where)

    def merge(self, other: Self) -> Self:
        raise self._refusal("")

    def qparams(self, spec: QuantSpec, *, where: str = "") -> QParams:
        raise self._refusal(where)

    def to_state(self) -> State:
        return State(self.tensors, self.record.values)

    @classmethod
    def from_state(cls, share: Granularity, state: State) -> Self:
        return cls(
            SiteRecord(statistics=cls.statistics, share=share, values=dict(state.values), tensors=[*state.tensors]),
            state.tensors,
        )

    def _refusal(self, where: str) -> ObservationError:
        return ObservationError(WITHHELD, where=where or None, advice=WITHHELD_ADVICE)


WITHHELD = "the statistics were not given with the text: it has their digests alone"
WITHHELD_ADVICE = (
    "parse it with them: qc.parse(text, constants), with quantc.text.digests.constants(program); or calibrate again"
)


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid")
    notes: dict[str, JsonValue] = Field(default_factory=dict)
    sites: dict[str, SiteRecord]
    collected: dict[str, HalvesRecord] = Field(default_factory=dict)


@dataclass(frozen=True)
class Statistics:
    """The observations of a program by site, and the caller's notes (JSON), such as the number of batches."""

    sites: Mapping[str, Observation]
    notes: Mapping[str, Any] = field(default_factory=dict)
    collected: Mapping[str, Halves] = field(default_factory=dict)
    """Statistics for passes that fit weights."""

    def save(self, path: Path | str) -> None:
        """Write a file atomically: an interruption leaves the previous file."""
        place = as_path(path, SaveError)
        check_ending(place, (".safetensors",), "statistics")
        self.write(place)

    def write(self, path: Path) -> None:
        """Write a file, without a check of its name."""
        sealed_tensors.write(path, STATISTICS, self._encoded(), VERSION)

    def to_bytes(self) -> bytes:
        """The file as bytes, to send to another process; see `from_bytes`."""
        return sealed_tensors.to_bytes(STATISTICS, self._encoded(), VERSION)

    @staticmethod
    def from_bytes(data: bytes) -> Statistics:
        """The inverse of `to_bytes`."""
        return _decoded("bytes", sealed_tensors.from_bytes(data, STATISTICS))

    def _encoded(self) -> dict[str, Tensor]:
        """All tensors by name, including the JSON that describes them."""
        tensors: dict[str, Tensor] = {}
        sites: dict[str, Any] = {}
        for name, observation in sorted(self.sites.items()):
            record, own = SiteRecord.of(observation)
            tensors |= {f"{name}|{key}": value.detach().cpu().contiguous() for key, value in own.items()}
            sites[name] = record.model_dump()
        document: dict[str, Any] = {"notes": dict(self.notes), "sites": sites}
        for name, halves in sorted(self.collected.items()):
            own_record, own = HalvesRecord.of(halves)
            tensors |= {f"{COLLECTED}{name}|{key}": value.cpu().contiguous() for key, value in own.items()}
            document.setdefault("collected", {})[name] = own_record.model_dump()
        text = json.dumps(document, sort_keys=True).encode()
        return {DOCUMENT: torch.frombuffer(bytearray(text), dtype=torch.uint8), **tensors}

    @staticmethod
    def load(path: Path | str) -> Statistics:
        """Read a file that `save` wrote. LoadError, naming the field, on anything else."""
        place = as_path(path, LoadError)
        try:
            tensors = sealed_tensors.read(place, STATISTICS)
        except LoadError as error:
            raise LoadError(f"{path} does not read: {error.what}", where=str(path), advice=error.advice) from error
        return _decoded(path, tensors)

    def merge(self, other: Statistics) -> Statistics:
        """The merged statistics of both, for data that was split. The notes are this one's."""
        merged = dict(self.sites)
        for name, observation in other.sites.items():
            merged[name] = _merge_at(name, merged[name], observation) if name in merged else observation
        collected = dict(self.collected)
        for name, halves in other.collected.items():
            collected[name] = _merge_at(name, collected[name], halves) if name in collected else halves
        return Statistics(merged, self.notes, collected)


def _merge_at(name: str, left: M, right: M) -> M:
    try:
        return left.merge(right)
    except QuantcError as error:
        error.where = name
        raise


def _decoded(path: Path | str, tensors: dict[str, Tensor]) -> Statistics:
    document = tensors.pop(DOCUMENT, None)
    if document is None or document.dtype != torch.uint8 or document.dim() != 1:
        raise LoadError(f"{path}: the tensor {DOCUMENT!r} is missing, or is not bytes", advice=ADVICE)
    try:
        header = _Document.model_validate_json(document.numpy().tobytes())
    except ValidationError as error:
        raise LoadError(f"{path} does not read: {'; '.join(faults_of(error))}", advice=ADVICE) from error
    sites = {name: _observation(path, name, site, tensors) for name, site in header.sites.items()}
    collected = {name: _halves(path, name, record, tensors) for name, record in header.collected.items()}
    if tensors:
        raise LoadError(f"{path} has a tensor {next(iter(tensors))!r} that belongs to no site", advice=ADVICE)
    return Statistics(sites, header.notes, collected)


def _observation(path: Path | str, name: str, site: SiteRecord, tensors: dict[str, Tensor]) -> Observation:
    keys = [key for key in dict.fromkeys(site.tensors) if f"{name}|{key}" in tensors]
    return site.restore({key: tensors.pop(f"{name}|{key}") for key in keys}, f"sites.{name} in {path}")


def _halves(path: Path | str, name: str, record: HalvesRecord, tensors: dict[str, Tensor]) -> Halves:
    keys = [key for key in dict.fromkeys(record.tensors) if f"{COLLECTED}{name}|{key}" in tensors]
    own = {key: tensors.pop(f"{COLLECTED}{name}|{key}") for key in keys}
    return record.restore(own, f"collected.{name} in {path}")
