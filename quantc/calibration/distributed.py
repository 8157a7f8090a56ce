"""Distributed calibration: each process takes its shard of the batches, and all end with the statistics of all.

Statistics are exchanged as the bytes of their files; nothing is pickled. Every process merges the same parts in the
same order, and merging is exact, so that all have the same bits as a single process would.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import torch
import torch.distributed as dist

from quantc.errors import CalibrationError, UnknownNameError, suggest

Shard = Literal["auto", "split", "given", "alone"] | tuple[int, int]
"""Distribution of the data over processes.

auto    split, if this is one of several processes of torch.distributed or torchrun; else alone
split   every process is given all batches, and process r of n takes those numbered r, r + n, r + 2n, ...
given   every process is given its own batches, as by a DistributedSampler
alone   every process calibrates by itself
(r, n)  by itself too, and takes the batches r, r + n, r + 2n, ... of all, for statistics that are merged from files
"""
SHARDS: tuple[str, ...] = ("auto", "split", "given", "alone")


@dataclass(frozen=True)
class Team:
    """The processes that calibrate together. A single process is a team of one."""

    rank: int = 0
    size: int = 1
    takes: Literal["split", "given"] = "split"
    group: Any = None
    """torch's process group."""
    is_apart: bool = False
    """True if the others are somewhere else, and statistics are merged later."""

    @property
    def is_single(self) -> bool:
        """True if nothing is exchanged."""
        return self.size == 1 or self.is_apart

    @property
    def name(self) -> str:
        """Name of this shard, for checkpoints."""
        return f"{self.rank} of {self.size}, {self.takes}" if self.size > 1 else "all"

    def share(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Batches that this process takes."""
        if self.size == 1 or self.takes == "given":
            return batches
        return islice(batches, self.rank, None, self.size)

    def number(self, index: int) -> int:
        """Global number of this process's batch `index`."""
        return index if self.size == 1 or self.takes == "given" else self.rank + index * self.size

    def exchange(self, payload: bytes) -> list[bytes]:
        """All-gather of payloads, in rank order."""
        if self.is_single:
            return [payload]
        own = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(own)]), group=self.group)
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(own)] = own
        parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(parts, padded, group=self.group)
        return [part[: int(size)].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]

    def agree(self, facts: dict[str, Any]) -> None:
        """Refuse to continue unless all processes have equal facts about what they calibrate."""
        told = [json.loads(part) for part in self.exchange(json.dumps(facts).encode())]
        for name in facts:
            values = [row[name] for row in told]
            if any(value != values[0] for value in values):
                raise CalibrationError(
                    f"the processes do not calibrate the same thing: {name} is {', '.join(map(str, values))}",
                    where=f"ranks 0 to {self.size - 1}",
                    advice="give every process the same model, config and number of threads (OMP_NUM_THREADS)",
                )


@contextmanager
def team_for(shard: Shard) -> Iterator[Team]:
    """The team to calibrate with. Under torchrun without a process group, a temporary one is created."""
    if isinstance(shard, tuple):
        yield _part(shard)
        return
    if shard not in SHARDS:
        raise UnknownNameError(
            f"unknown sharding {shard!r}",
            where=f"shard={shard!r}",
            advice=suggest(str(shard), SHARDS, noun="ways"),
        )
    if shard == "alone" or not dist.is_available():
        yield Team()
        return
    is_ready = dist.is_initialized()
    if not is_ready and not _is_torchrun():
        _refuse_without_group(shard)
        yield Team()
        return
    if not is_ready:
        dist.init_process_group("gloo")
    try:
        # statistics are on the CPU, whatever the model's own group is for
        group = None if "gloo" in dist.get_backend() else dist.new_group(backend="gloo")
        yield Team(dist.get_rank(), dist.get_world_size(), "given" if shard == "given" else "split", group)
    finally:
        if not is_ready:
            dist.destroy_process_group()


def _part(shard: tuple[Any, ...]) -> Team:
    """A part of the data, by its number and how many there are."""
    if len(shard) != 2 or any(type(number) is not int for number in shard) or not 0 <= shard[0] < shard[1]:
        raise CalibrationError(
            f"{shard!r} is not a part of the data",
            where=f"shard={shard!r}",
            advice="give (part, parts): (0, 3), (1, 3) and (2, 3) are all of it",
        )
    return Team(*shard, is_apart=True)


def _is_torchrun() -> bool:
    return all(name in os.environ for name in ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE"))


def _refuse_without_group(shard: Shard) -> None:
    if shard != "auto":
        raise CalibrationError(
            f"shard={shard!r} was asked for, and there is no process group",
            where=f"shard={shard!r}",
            advice="start with torchrun, or call torch.distributed.init_process_group('gloo') first",
        )
