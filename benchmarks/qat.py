"""A step of quantization-aware training beside the float step, torch.ao's and torchao's, in one run.

    python -m benchmarks.qat [--batch 8] [--size 224] [--rounds 7] [--json FILE]

A step is forward, loss, backward and SGD on ResNet-18, on one thread; contenders take turns. `times float` is the median
over the rounds of the ratio within a round, in seconds of the processor.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.export import Dim, export

import quantc as qc
from quantc.bench.networks import resnet18
from quantc.bench.race import quietly_on_one_thread, speed, take_turns

FLOAT, OWN, LEARNED = "float", "quantc", "quantc, learned scales"
PEER, EXPORTED = "torch.ao, fx", "torchao, pt2e"
Step = Callable[[Tensor, Tensor], None]


def float_model(model: nn.Module, example: tuple[Tensor]) -> Any:
    return model


def own(model: nn.Module, example: tuple[Tensor]) -> Any:
    return qc.prepare(qc.capture(model.eval(), example), "x86", qat=True)


def own_learned(model: nn.Module, example: tuple[Tensor]) -> Any:
    weights = qc.INT8_NARROW_WEIGHT.but(observe="lsq")
    config = qc.QuantConfig().set_all(qc.UINT8.but(observe="lsq-plus")).set_all(weights)
    return qc.prepare(qc.capture(model.eval(), example), "x86", qat=True, config=config)


def torch_fx(model: nn.Module, example: tuple[Tensor]) -> Any:
    from torch.ao.quantization import get_default_qat_qconfig_mapping
    from torch.ao.quantization.quantize_fx import prepare_qat_fx

    return prepare_qat_fx(model.train(), get_default_qat_qconfig_mapping("x86"), example)


def torchao_pt2e(model: nn.Module, example: tuple[Tensor]) -> Any:
    from torchao.quantization.pt2e.quantize_pt2e import prepare_qat_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config(is_qat=True))
    program = export(model.train(), example, dynamic_shapes=({0: Dim("batch", max=1024)},), strict=True)
    return prepare_qat_pt2e(program.module(), quantizer)


CONTENDERS: dict[str, Callable[[nn.Module, tuple[Tensor]], Any]] = {
    FLOAT: float_model,
    OWN: own,
    LEARNED: own_learned,
    PEER: torch_fx,
    EXPORTED: torchao_pt2e,
}


def step_of(model: Any) -> Step:
    """A training step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

    def step(images: Tensor, labels: Tensor) -> None:
        with torch.enable_grad():
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contender", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = resnet18().train()
    images, labels = torch.randn(options.batch, 3, options.size, options.size), torch.randint(0, 1000, (options.batch,))
    steps: dict[str, Any] = {}
    failed: dict[str, str] = {}
    with quietly_on_one_thread():
        for name in dict.fromkeys((FLOAT, *options.contender)):
            try:
                with torch.enable_grad():
                    steps[name] = step_of(CONTENDERS[name](copy.deepcopy(model), (images,)))
            except Exception as error:  # noqa: BLE001 - a peer that cannot take part is a result
                failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
        spent = take_turns(steps, (images, labels), options.rounds)
    table = Table("contender", "ms a step, best", "times float")
    data = []
    for name, times in spent.items():
        ratio = 1 / speed(spent[FLOAT], times)
        table.add_row(name, f"{min(times) * 1e3:.0f}", f"{ratio:.2f}")
        data.append({"contender": name, "milliseconds": min(times) * 1e3, "times_float": ratio})
    for name, reason in failed.items():
        table.add_row(name, reason, "")
    Console(width=120).print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
