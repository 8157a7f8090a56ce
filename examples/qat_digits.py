"""Train the separable digits example with 4-bit weights and 8-bit activations, and plot it.

    python -m examples.qat_digits [--plot docs/qat-digits.svg]

Prints the accuracy of the float model, after calibration, and after training.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.export import Dim
from torch.nn.functional import cross_entropy

import quantc as qc
from examples.train_digits import shifted
from quantc.cli.example import Digits, digits_cnn, digits_split, separable_cnn
from quantc.ir.program import Program
from quantc.qat.training_chart import Curve, write_plot

BATCH_SIZE = 32
RATE = 0.01
INT4 = qc.INT8_NARROW_WEIGHT.but(qmin=-7, qmax=7)
W4A8 = qc.QuantConfig().set_all(INT4)
"""4-bit weights with a scale a channel, which x86's kernels read as bytes; activations are the backend's own, 8 bits."""
W8A8 = qc.QuantConfig()


@dataclass(frozen=True)
class Course:
    """The course of a training run."""

    losses: tuple[float, ...]
    """One a step."""
    accuracies: tuple[float, ...]
    """On held-out images, one an epoch, in percent."""


def captured(name: str = "separable") -> Program:
    """The float program, for any number of images."""
    model, example = separable_cnn() if name == "separable" else digits_cnn()
    return qc.capture(model, example, dynamic_shapes=({0: Dim("batch")},))


def accuracy(program: Program, data: Digits) -> float:
    with torch.no_grad():
        return 100 * float((program(data.images).argmax(1) == data.labels).double().mean())


def calibrated(program: Program, config: qc.QuantConfig, data: Digits) -> Program:
    """The program after static quantization."""
    prepared = qc.prepare(program, "x86", config=config)
    qc.calibrate(prepared, torch.split(data.images[:256], BATCH_SIZE), progress="silent")
    return qc.convert(prepared)


def epoch(data: Digits) -> Iterator[tuple[Tensor, Tensor]]:
    for chosen in torch.split(torch.randperm(len(data.labels)), BATCH_SIZE):
        yield shifted(data.images[chosen]), data.labels[chosen]


def trained(
    program: Program, config: qc.QuantConfig, training: Digits, held_out: Digits, *, epochs: int = 12, seed: int = 1
) -> tuple[Program, Course]:
    """The program after QAT. Norms and ranges are frozen for the last third, so that the weights settle on fixed scales."""
    torch.manual_seed(seed)
    prepared = qc.prepare(program, "x86", config=config, qat=True)
    optimizer = torch.optim.SGD(prepared.parameters(), lr=RATE, momentum=0.9)
    slower = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    steps = len(training.labels) // BATCH_SIZE + 1
    frozen = 2 * epochs * steps // 3
    schedule = qc.qat.Schedule(freeze_norms=frozen, freeze_ranges=frozen)
    losses: list[float] = []
    accuracies: list[float] = []
    for _ in range(epochs):
        report = qc.qat.train(
            prepared,
            epoch(training),
            lambda logits, labels: cross_entropy(logits, labels, label_smoothing=0.05),
            optimizer,
            schedule=schedule,
            first_step=len(losses) + 1,
        )
        slower.step()
        losses += report.losses
        accuracies.append(accuracy(prepared.eval(), held_out))
    return qc.convert(prepared), Course(tuple(losses), tuple(accuracies))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    training, held_out = digits_split()
    program = captured()
    whole = accuracy(program, held_out)
    static = accuracy(calibrated(program, W4A8, training), held_out)
    converted, course = trained(program, W4A8, training, held_out, epochs=options.epochs, seed=options.seed)
    final = accuracy(converted, held_out)
    print(
        f"float {whole:.2f}%, calibrated {static:.2f}%, trained {final:.2f}% of {len(held_out.labels)} held-out images"
    )
    if options.plot is not None:
        curves = (
            Curve(
                "held-out accuracy while training, 4-bit weights, %",
                course.accuracies,
                each=len(course.losses) // options.epochs,
            ),
        )
        lines = {f"float, {whole:.2f}%": whole, f"calibrated without training, {static:.2f}%": static}
        write_plot(options.plot, "4-bit weights, 8-bit activations", curves, lines)


if __name__ == "__main__":
    main()
