"""A training in several processes: `torchrun -m tests.support.distributed_training OUT` writes what each ends with."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import quantc as qc
from quantc.ir.program import Program

STEPS, SHARD = 5, 6


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch of a step, for all processes together."""
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(2 * SHARD, 3, 6, 6, generator=generator)
    return images, torch.randint(0, 4, (2 * SHARD,), generator=generator)


def prepared(observe: str) -> Program:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4))
    config = qc.QuantConfig().set_all(qc.UINT8.but(observe=observe))
    return qc.prepare(qc.capture(model.eval(), (data(0)[0][:SHARD],)), "x86", config=config, qat=True)


def main(out: Path, observe: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    program = prepared(observe)
    module = DistributedDataParallel(program.module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        images, labels = (part[rank * SHARD : (rank + 1) * SHARD] for part in data(step))
        optimizer.zero_grad()
        functional.cross_entropy(module(images), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    torch.save({name: tensor.clone() for name, tensor in program.named_parameters()}, out / f"parameters.{rank}.pt")
    if rank == 0:  # whose ranges and statistics the others are given before each step
        program.eval()
        images = data(99)[0][:SHARD]
        with torch.no_grad():
            torch.save((program(images), qc.convert(program)(images)), out / "outputs.pt")
    distributed.barrier()
    del module  # its reducer must be gone before the group it talks to
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
