"""Static quantization on kernels, beside torch.ao's FX graph mode and torchao's PT2E with inductor, in one run.

    python -m benchmarks.kernels [--model "ResNet-18" ...] [--rounds 15] [--peers fx pt2e] [--json FILE]

All contenders take turns in one process, on one thread, on the same input. How many times faster than the float model
each is, is the median over the rounds, in seconds of the processor: a shared machine slows all of a round alike. SQNR is
against the float model, on inputs that nobody has seen.
"""

from __future__ import annotations

import argparse
import copy
import json
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import quantc as qc
from benchmarks.calibrate import resnet18
from benchmarks.dynamic import EAGER, Inputs, Model, Row, mlp, noise, race
from tests.encoders import TextEncoder, ViT, images, initialised, texts
from tests.zoo.vision import MobileNetV2

OURS = "quantc x86"
CALIBRATION = 4
"""How many batches are calibrated with."""


def settled(model: nn.Module, size: int = 224) -> nn.Module:
    """Batch norms that know their data: random weights make activations grow or vanish otherwise."""
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out")
    model.train()
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(4, 3, size, size))
    return model.eval()


MODELS: dict[str, Model] = {
    "ResNet-18": Model(lambda: settled(resnet18()), noise(1, 3, 224, 224)),
    "ResNet-18, batch 8": Model(lambda: settled(resnet18()), noise(8, 3, 224, 224)),
    "MobileNetV2": Model(lambda: settled(MobileNetV2(1000)), noise(1, 3, 224, 224)),
    "BERT-like": Model(lambda: initialised(TextEncoder()), lambda seed: texts(4, 1, 128, 30522, seed)),
    "ViT-Tiny": Model(lambda: initialised(ViT()), lambda seed: images(4, 1, 224, seed)),
    "MLP 4096": Model(mlp, noise(1, 4096)),
}


def ours(model: nn.Module, batches: Inputs) -> Callable[..., Any]:
    prepared = qc.prepare(qc.capture(model, batches[0]), "x86")
    qc.calibrate(prepared, batches, progress="silent")
    return qc.lower(qc.convert(prepared, reduce_range="weights"), "x86")


def by_fx(engine: str) -> Callable[[nn.Module, Inputs], Callable[..., Any]]:
    """torch.ao's FX graph mode for one of its engines."""

    def converted(model: nn.Module, batches: Inputs) -> Callable[..., Any]:
        from torch.ao.quantization import get_default_qconfig_mapping
        from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

        torch.backends.quantized.engine = engine
        mapping = get_default_qconfig_mapping(engine)
        prepared = prepare_fx(copy.deepcopy(model), mapping, batches[0])
        for batch in batches:
            prepared(*batch)
        made: Callable[..., Any] = convert_fx(prepared)
        return made

    return converted


def by_pt2e(model: nn.Module, batches: Inputs) -> Callable[..., Any]:
    """torchao's PT2E flow, compiled by inductor."""
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
        X86InductorQuantizer,
        get_default_x86_inductor_quantization_config,
    )

    exported = torch.export.export(model, batches[0], strict=True).module()
    quantizer = X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config())
    prepared = prepare_pt2e(exported, quantizer)
    for batch in batches:
        prepared(*batch)
    compiled: Callable[..., Any] = torch.compile(convert_pt2e(prepared))
    compiled(*batches[0])
    return compiled


PEERS: dict[str, Callable[[nn.Module, Inputs], Callable[..., Any]]] = {
    "fx-x86": by_fx("x86"),
    "fx-onednn": by_fx("onednn"),
    "pt2e": by_pt2e,
}


@dataclass(frozen=True)
class Failed:
    """A contender that could not be made."""

    contender: str
    reason: str


def measure(name: str, rounds: int, peers: list[str]) -> tuple[list[Row], list[Failed]]:
    torch.manual_seed(0)
    model = MODELS[name].build().eval()
    batches, unseen = MODELS[name].data(1)[:CALIBRATION], MODELS[name].data(2)
    steps: dict[str, Callable[..., Any]] = {EAGER: model, OURS: ours(model, batches)}
    failed: list[Failed] = []
    for peer in peers:
        try:
            steps[peer] = PEERS[peer](model, batches)
            steps[peer](*unseen[0])
        except Exception as error:  # noqa: BLE001 - what a peer cannot do is a row of the table
            failed.append(Failed(peer, str(error).splitlines()[0] if str(error) else repr(error)))
            steps.pop(peer, None)
    return race(name, steps, unseen, rounds), failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    table = Table("model", "contender", "ms, best", "times eager fp32", "SQNR, dB")
    rows: list[Row] = []
    with torch.no_grad():
        for name in options.model:
            found, failed = measure(name, options.rounds, options.peers)
            rows += found
            for row in found:
                decibels = "" if row.contender == EAGER else f"{row.sqnr:.1f}"
                table.add_row(name, row.contender, f"{row.milliseconds:.2f}", f"{row.speed:.2f}", decibels)
            for miss in failed:
                table.add_row(name, miss.contender, "failed", miss.reason[:60], "")
            table.add_section()
    Console(width=120).print(table)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
