"""Files that earlier versions wrote, and what is made of them: `tests/data/kept/`, written by `python -m tests.support.kept_files`.

They are never written again: a later version reads what an earlier one wrote. `pickles.pt` holds models and values of each
flow, pickled by the last version whose modules lay flat.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import quantc as qc
from quantc.flows import eager, fx, tracing
from tests.support.paths import TESTS

FOLDER = TESTS / "data" / "kept"


class Net(nn.Module):
    """A convolution with a norm, a sum, a pool and a linear layer, between stubs that only the eager flow looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = eager.QuantStub(), eager.DeQuantStub()
        self.conv, self.norm, self.relu = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.conv(self.quant(x))))
        result: Tensor = self.dequant(self.head(x.mean((2, 3))))
        return result


def model(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    made = Net()
    made.norm.running_mean.uniform_(-1, 1)  # type: ignore[union-attr]
    return made.eval()


def images(seed: int = 0) -> Tensor:
    return torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(seed))


def prepared(observe: str = "minmax") -> qc.Program:
    config = qc.QuantConfig().set_all(qc.UINT8.but(observe=observe), role="act")
    return qc.prepare(qc.capture(model(), (images(),)), "x86", config=config)


def calibrated(made: qc.Program) -> qc.CalibrationReport:
    return qc.calibrate(made, [images(seed) for seed in range(3)])


def static() -> qc.Program:
    made = prepared()
    calibrated(made)
    return qc.convert(made)


PROGRAMS: dict[str, Callable[[], qc.Program]] = {
    "float": lambda: qc.capture(model(), (images(),)),
    "static": static,
    "weight-only": lambda: qc.quantize(model(), (images(),), mode="weight-only").program,
}
STATISTICS = ("minmax", "histogram", "moving-average")


def converted_eagerly(seed: int) -> nn.Module:
    given = model(seed)
    given.qconfig = eager.get_default_qconfig("x86")  # type: ignore[assignment]
    fused = eager.fuse_modules(given, ["conv", "norm", "relu"])
    made = eager.prepare(fused)
    made(images(seed))
    return eager.convert(made)


def converted_by_fx(seed: int) -> nn.Module:
    made = fx.prepare_fx(model(seed), fx.get_default_qconfig_mapping("x86"), (images(),))
    made(images(seed))
    return fx.convert_fx(made)


def converted_by_tracing(seed: int) -> nn.Module:
    made = tracing.prepare(model(seed), images())
    with torch.no_grad():
        made(images(seed))
    return tracing.convert(made)


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "eager": converted_eagerly,
    "fx": converted_by_fx,
    "tracing": converted_by_tracing,
}


def main() -> None:
    FOLDER.mkdir(parents=True)
    expected: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, make in PROGRAMS.items():
            program = make()
            program.save(FOLDER / f"{name}.qc")
            expected[name] = program(images(9))
        for name in STATISTICS:
            seen = prepared(name)
            calibrated(seen).statistics.save(FOLDER / f"{name}.statistics")
            expected[f"{name}.statistics"] = qc.convert(seen)(images(9))
        for name, build in MODELS.items():
            made: Any = build(0)
            torch.save(made.state_dict(), FOLDER / f"{name}.pt")
            expected[f"{name}.pt"] = made(images(9))
    save_file(expected, FOLDER / "expected.safetensors")


def expected() -> dict[str, Tensor]:
    return load_file(FOLDER / "expected.safetensors")


if __name__ == "__main__":
    main()
