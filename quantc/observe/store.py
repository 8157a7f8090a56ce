"""Statistics in a file: one safetensors file whose metadata is JSON. Reading it executes nothing.

    {"format": "quantc.statistics", "version": 1, "notes": {...}, "sites": {"conv2d:out0": {"statistics": "minmax",
     "share": {"kind": "per-tensor"}, "values": {"seen": 64, "non_finite": 0}, "tensors": ["high", "low"]}}}

A tensor `high` of that site is stored under `conv2d:out0|high`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from quantc.errors import LoadError, PluginError, QuantcError, UnknownNameError
from quantc.formats import Granularity
from quantc.frozen import faults_of
from quantc.observe.observation import Observation, State
from quantc.observe.registry import OBSERVATIONS

FORMAT = "quantc.statistics"
ADVICE = "give a file that quantc wrote, or calibrate again"


class _Site(BaseModel):
    model_config = ConfigDict(extra="forbid")
    statistics: str
    share: Granularity
    values: dict[str, JsonValue]
    tensors: list[str]


class _Header(BaseModel):
    model_config = ConfigDict(extra="forbid")
    format: Literal["quantc.statistics"]
    version: Literal[1]
    notes: dict[str, JsonValue] = Field(default_factory=dict)
    sites: dict[str, _Site]


@dataclass(frozen=True)
class Statistics:
    """The observations of a program by site, and notes of the caller's (JSON), such as how many batches are in."""

    sites: Mapping[str, Observation]
    notes: Mapping[str, Any] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write a file, whole or not at all: an interruption leaves the file that was there before."""
        tensors: dict[str, Tensor] = {}
        sites: dict[str, Any] = {}
        for name, observation in sorted(self.sites.items()):
            state = observation.to_state()
            tensors |= {f"{name}|{key}": value.contiguous().clone() for key, value in state.tensors.items()}
            sites[name] = {
                "statistics": observation.statistics,
                "share": observation.share.model_dump(),
                "values": dict(state.values),
                "tensors": sorted(state.tensors),
            }
        header = {"format": FORMAT, "version": 1, "notes": dict(self.notes), "sites": sites}
        draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
        try:
            save_file(tensors, draft, metadata={"quantc": json.dumps(header, sort_keys=True)})
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)

    @staticmethod
    def load(path: Path) -> Statistics:
        """Read a file that `save` wrote. LoadError, naming the field, on anything else."""
        header, tensors = _read(path)
        sites = {name: _observation(path, name, site, tensors) for name, site in header.sites.items()}
        if tensors:
            raise LoadError(f"{path} has a tensor {next(iter(tensors))!r} that belongs to no site", advice=ADVICE)
        return Statistics(sites, header.notes)

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


def _read(path: Path) -> tuple[_Header, dict[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is not a dict
    except (OSError, SafetensorError) as error:
        raise LoadError(f"{path} is not a safetensors file: {error}", advice=ADVICE) from error
    if "quantc" not in metadata:
        raise LoadError(f"{path} holds no statistics: its metadata has no field 'quantc'", advice=ADVICE)
    try:
        return _Header.model_validate_json(metadata["quantc"]), tensors
    except ValidationError as error:
        raise LoadError(f"{path} does not read: {'; '.join(faults_of(error))}", advice=ADVICE) from error


def _observation(path: Path, name: str, site: _Site, tensors: dict[str, Tensor]) -> Observation:
    where = f"sites.{name} in {path}"
    for key in site.tensors:
        if f"{name}|{key}" not in tensors:
            raise LoadError(f"the tensor {key!r} is missing", where=where, advice=ADVICE)
    state = State({key: tensors.pop(f"{name}|{key}") for key in site.tensors}, site.values)
    try:
        return OBSERVATIONS[site.statistics].from_state(site.share, state)
    except (UnknownNameError, PluginError) as error:
        raise LoadError(f"the field 'statistics': {error.what}", where=where, advice=error.advice) from error
    except QuantcError as error:
        raise LoadError(error.what, where=where, advice=ADVICE) from error
