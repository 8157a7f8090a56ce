"""Statistics in a file: one safetensors file whose metadata is JSON. Reading it executes nothing.

    {"format": "quantc.statistics", "version": 1, "notes": {...}, "sites": {"conv2d:out0": {"statistics": "minmax",
     "share": {"kind": "per-tensor"}, "values": {"seen": 64, "non_finite": 0}, "tensors": ["high", "low"]}}}

A tensor `high` of that site is stored under `conv2d:out0|high`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save, save_file
from torch import Tensor

from quantc.errors import LoadError, PluginError, QuantcError, UnknownNameError
from quantc.formats import Granularity
from quantc.frozen import faults_of
from quantc.observe.observation import Observation, State
from quantc.observe.registry import OBSERVATIONS
from quantc.whole_file import whole_file

FORMAT = "quantc.statistics"
ADVICE = "give a file that quantc wrote, or calibrate again"


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
        state = observation.to_state()
        record = SiteRecord(
            statistics=observation.statistics,
            share=observation.share,
            values=dict(state.values),
            tensors=sorted(state.tensors),
        )
        return record, state.tensors

    def restore(self, tensors: Mapping[str, Tensor], where: str) -> Observation:
        """The observation, given its tensors. LoadError, naming the field, if they do not fit."""
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


class _Header(BaseModel):
    model_config = ConfigDict(extra="forbid")
    format: Literal["quantc.statistics"]
    version: Literal[1]
    notes: dict[str, JsonValue] = Field(default_factory=dict)
    sites: dict[str, SiteRecord]


@dataclass(frozen=True)
class Statistics:
    """The observations of a program by site, and notes of the caller's (JSON), such as how many batches are in."""

    sites: Mapping[str, Observation]
    notes: Mapping[str, Any] = field(default_factory=dict)

    def save(self, path: Path | str) -> None:
        """Write a file, whole or not at all: an interruption leaves the file that was there before."""
        tensors, header = self._encoded()
        with whole_file(Path(path)) as draft:
            save_file(tensors, draft, metadata={"quantc": header})

    def to_bytes(self) -> bytes:
        """What `from_bytes` reads, to send it to another process."""
        tensors, header = self._encoded()
        text = header.encode()
        return len(text).to_bytes(8, "little") + text + save(tensors)

    @staticmethod
    def from_bytes(data: bytes) -> Statistics:
        """What `to_bytes` wrote."""
        end = 8 + int.from_bytes(data[:8], "little")
        try:
            tensors = load(data[end:])
        except SafetensorError as error:
            raise LoadError(f"these bytes are not statistics: {error}", advice=ADVICE) from error
        return _decoded("bytes", data[8:end], tensors)

    def _encoded(self) -> tuple[dict[str, Tensor], str]:
        """All tensors by name, and the JSON that says what they are."""
        tensors: dict[str, Tensor] = {}
        sites: dict[str, Any] = {}
        for name, observation in sorted(self.sites.items()):
            record, own = SiteRecord.of(observation)
            tensors |= {f"{name}|{key}": value.contiguous().clone() for key, value in own.items()}
            sites[name] = record.model_dump()
        header = {"format": FORMAT, "version": 1, "notes": dict(self.notes), "sites": sites}
        return tensors, json.dumps(header, sort_keys=True)

    @staticmethod
    def load(path: Path | str) -> Statistics:
        """Read a file that `save` wrote. LoadError, naming the field, on anything else."""
        return _decoded(path, *_read(path))

    def merge(self, other: Statistics) -> Statistics:
        """The statistics of both, for data that was split. The notes are this one's."""
        merged = dict(self.sites)
        for name, observation in other.sites.items():
            merged[name] = _merge_at(name, merged[name], observation) if name in merged else observation
        return Statistics(merged, self.notes)


def _merge_at(name: str, left: Observation, right: Observation) -> Observation:
    try:
        return left.merge(right)
    except QuantcError as error:
        error.where = name
        raise


def _read(path: Path | str) -> tuple[str, dict[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is not a dict
    except (OSError, SafetensorError) as error:
        raise LoadError(f"{path} is not a safetensors file: {error}", advice=ADVICE) from error
    if "quantc" not in metadata:
        raise LoadError(f"{path} holds no statistics: its metadata has no field 'quantc'", advice=ADVICE)
    return metadata["quantc"], tensors


def _decoded(path: Path | str, text: str | bytes, tensors: dict[str, Tensor]) -> Statistics:
    try:
        header = _Header.model_validate_json(text)
    except ValidationError as error:
        raise LoadError(f"{path} does not read: {'; '.join(faults_of(error))}", advice=ADVICE) from error
    sites = {name: _observation(path, name, site, tensors) for name, site in header.sites.items()}
    if tensors:
        raise LoadError(f"{path} has a tensor {next(iter(tensors))!r} that belongs to no site", advice=ADVICE)
    return Statistics(sites, header.notes)


def _observation(path: Path | str, name: str, site: SiteRecord, tensors: dict[str, Tensor]) -> Observation:
    keys = [key for key in dict.fromkeys(site.tensors) if f"{name}|{key}" in tensors]
    return site.restore({key: tensors.pop(f"{name}|{key}") for key in keys}, f"sites.{name} in {path}")
