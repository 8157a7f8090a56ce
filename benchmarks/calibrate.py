"""Cost of calibration: one calibrating forward beside the float forward and other tools, in one run.

    python -m benchmarks.calibrate [--batch 8] [--size 224] [--rounds 9] [--json FILE]

The model is ResNet-18 in plain torch. All contenders take turns in one process, one thread, on the same batch; the
ratio to the eager float forward is taken round by round, and its median counts, since a shared machine slows all of
a round alike.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import quantc as qc
from quantc.bench.networks import resnet18
from quantc.calibration.accumulator import Tally
from quantc.calibration.interpreter import Runner
from quantc.calibration.state_isolation import Isolation
from quantc.ir.program import Program
from quantc.passes.insert_observers import InsertObservers
from quantc.spec.spec import UINT8

Forward = Callable[[Tensor], object]
EAGER = "eager float"


def prepared(model: nn.Module, x: Tensor, observe: str) -> Program:
    """The model prepared for x86, with one way to observe activations."""
    from quantc.backends.x86 import X86

    return qc.prepare(qc.capture(model, (x,)), X86.but(act=UINT8.but(observe=observe)))


def calibration_step(program: Program) -> Forward:
    """The work of `qc.calibrate` per batch."""
    tally = Tally(program, {})
    runner, isolation = Runner(program, tally.watchers()), Isolation(program)

    def step(x: Tensor) -> None:
        tally.begin()
        with isolation.batch(0, [x]) as inputs:
            runner.run(inputs)
        tally.commit(len(x))

    return step


def float_step(program: Program) -> Forward:
    """The same without observing."""
    runner = Runner(program, {})
    return lambda x: runner.run([x])


def fx_graph_mode(model: nn.Module, x: Tensor, observer: Any) -> Forward:
    from torch.ao.quantization import QConfig, QConfigMapping, default_per_channel_weight_observer
    from torch.ao.quantization.quantize_fx import prepare_fx

    activation = observer.with_args(dtype=torch.quint8)
    mapping = QConfigMapping().set_global(QConfig(activation, default_per_channel_weight_observer))  # type: ignore[no-untyped-call]
    module: Forward = prepare_fx(copy.deepcopy(model), mapping, (x,))
    return module


def pt2e(model: nn.Module, x: Tensor, observer: Any) -> Forward:
    from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e
    from torchao.quantization.pt2e.quantizer import QuantizationConfig, QuantizationSpec
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    default = x86.get_default_x86_inductor_quantization_config()
    act = QuantizationSpec(
        dtype=torch.uint8,
        observer_or_fake_quant_ctr=observer.with_args(eps=2**-12),
        quant_min=0,
        quant_max=255,
        qscheme=torch.per_tensor_affine,
    )
    config = QuantizationConfig(act, act, default.weight, default.bias)
    exported = torch.export.export(model, (x,)).module()
    module: Forward = prepare_pt2e(exported, x86.X86InductorQuantizer().set_global(config))
    return module


def contenders(model: nn.Module, x: Tensor) -> dict[str, Forward]:
    from torch.ao.quantization.observer import HistogramObserver, MinMaxObserver
    from torchao.quantization.pt2e.observer import HistogramObserver as PT2EHistogram
    from torchao.quantization.pt2e.observer import MinMaxObserver as PT2EMinMax

    minmax, histogram = prepared(model, x, "minmax"), prepared(model, x, "mse")
    inserted = qc.Pipeline((InsertObservers(),)).run_on_copy(minmax)
    return {
        EAGER: model,
        "quantc, runner without observing": float_step(minmax),
        "quantc minmax": calibration_step(minmax),
        "quantc histogram (mse)": calibration_step(histogram),
        "quantc minmax, inserted observers": inserted.module,
        "torch.ao FX minmax": fx_graph_mode(model, x, MinMaxObserver),
        "torch.ao FX histogram": fx_graph_mode(model, x, HistogramObserver),
        "torchao PT2E minmax": pt2e(model, x, PT2EMinMax),
        "torchao PT2E histogram": pt2e(model, x, PT2EHistogram),
    }


@torch.no_grad()
def measure(steps: dict[str, Forward], x: Tensor, rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each contender, round by round; the first round is for warming up."""
    spent: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            begin = time.process_time()
            step(x)
            if number:
                spent[name].append(time.process_time() - begin)
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model, x = resnet18(), torch.randn(options.batch, 3, options.size, options.size)
    spent = measure(contenders(model, x), x, options.rounds)
    ratios = {
        name: median(own / eager for own, eager in zip(times, spent[EAGER], strict=True))
        for name, times in spent.items()
    }
    table = Table("ResNet-18", "ms, best", "ms, median", "times eager float, median")
    for name, times in spent.items():
        table.add_row(name, f"{min(times) * 1e3:.0f}", f"{median(times) * 1e3:.0f}", f"{ratios[name]:.2f}")
    Console(width=120).print(table)
    if options.json is not None:
        options.json.write_text(json.dumps({"ratios": ratios, "seconds": spent}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
