"""`quantc.bench`: contenders, the race, the kernel floor and the chart, on tiny models."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc.bench.built import Built
from quantc.bench.chart import chart, write_plot
from quantc.bench.contenders import CONTENDERS, Contender, chosen, torch_dynamic, weights_of
from quantc.bench.floor import kernel_floor
from quantc.bench.measure import Outcome, measure, why
from quantc.bench.models import Task, initialised, noise, settled, task_of
from quantc.bench.networks import EfficientNetLite0, MobileNetV2, ViT, resnet18
from quantc.bench.race import EAGER, Row, closeness, race, speed, take_turns
from quantc.errors import MissingDependencyError, QuantcError, SaveError, UnknownNameError
from quantc.targets.kernels.kernel import Kernel


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTC_CACHE", str(tmp_path / "cache"))


class Residual(nn.Module):
    """Convolutions with a sum that a kernel may write over, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Any:
        y = torch.relu(self.first(x))
        y = torch.relu(self.second(y) + y)
        return self.head(y.mean((2, 3)))


def tiny_task() -> Task:
    torch.manual_seed(0)
    data = noise(3, 12, 12)
    return Task("tiny", Residual().eval(), data(1, 2), data(2, 2))


def silent(_: str) -> None:
    """Nobody wants to know."""


# -- the race --------------------------------------------------------------------------------------------------


def test_ratios_are_medians_of_rounds() -> None:
    assert speed([1.0, 2.0, 9.0], [2.0, 1.0, 3.0]) == 2.0
    assert speed([1.0], [1.0]) == 1.0


def test_turns_alternate_and_time_what_they_call() -> None:
    order: list[str] = []

    def busy(name: str, seconds: float) -> Any:
        def step() -> None:
            order.append(name)
            end = time.process_time() + seconds
            while time.process_time() < end:
                pass

        return step

    rounds = 12
    spent = take_turns({"slow": busy("slow", 0.006), "fast": busy("fast", 0.003)}, (), rounds)
    turns = order[-4 * rounds :]  # in each, one call that is not timed and one that is
    pairs = {tuple(turns[at : at + 4]) for at in range(0, len(turns), 4)}
    assert pairs == {("slow", "slow", "fast", "fast"), ("fast", "fast", "slow", "slow")}, "each comes first at times"
    assert {name: len(times) for name, times in spent.items()} == {"slow": rounds, "fast": rounds}
    assert all(each >= 0.006 for each in spent["slow"])
    assert 1.5 < speed(spent["slow"], spent["fast"]) < 2.5


def test_closeness_is_the_ratio_of_powers() -> None:
    generator = np.random.default_rng(0)
    pairs = [(generator.normal(size=(3, 5)), generator.normal(size=(3, 5)) * 0.1) for _ in range(2)]
    unseen = [(torch.tensor(x, dtype=torch.float32), torch.tensor(e, dtype=torch.float32)) for x, e in pairs]
    found = closeness(lambda x, e: x, lambda x, e: x + e, unseen)
    signal, error = (sum(float((pair[at] ** 2).sum()) for pair in pairs) for at in (0, 1))
    assert found == pytest.approx(10 * math.log10(signal / error), abs=1e-3)
    with pytest.raises(QuantcError, match="another form"):
        closeness(lambda x, e: x, lambda x, e: x[:1], unseen)


def test_a_race_has_a_row_for_each() -> None:
    task = tiny_task()
    rows = race("tiny", {EAGER: task.model, "same": task.model}, task.unseen, 2)
    assert [row.contender for row in rows] == [EAGER, "same"]
    assert rows[1].sqnr == math.inf
    assert rows[1].to_data()["sqnr"] == "inf", "JSON has no infinity"


# -- contenders ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    def broken(_: Task) -> Built:
        raise ValueError("first line\nsecond line")

    def elsewhere(task: Task) -> Built:
        return Built(lambda *inputs: task.model(*inputs)[:1], None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUANTC_CACHE", str(tmp_path_factory.mktemp("cache")))
        contenders = {
            **chosen(["quantc", "quantc-tuned", "quantc-dynamic", "fx-x86", "fx-fbgemm", "torch-dynamic"]),
            "broken": Contender("raises", broken),
            "elsewhere": Contender("yields half of it", elsewhere),
            "absent": Contender("needs more", broken, ("no_such_package",)),
        }
        return measure(tiny_task(), contenders, 2, tell=silent, with_floor=True)


def test_contenders_run_beside_those_that_fail(outcome: Outcome) -> None:
    rows = {row.contender: row for row in outcome.rows}
    assert rows["broken"].reason == "ValueError: first line"
    assert "another form or shape" in rows["elsewhere"].reason
    assert rows["absent"].reason == "no_such_package is not installed; pip install 'quantc[bench]'"
    failed = {"broken", "elsewhere", "absent"}
    for name, row in rows.items():
        assert (row.speed is None) == (name in failed)
        assert bool(row.reason) == (name in failed), row.reason
    for name in rows.keys() - failed - {EAGER}:
        sqnr, best = rows[name].sqnr, rows[name].milliseconds
        assert best is not None
        assert best > 0
        assert sqnr is not None
        assert sqnr > 20, name
    assert rows[EAGER].speed == rows[EAGER].size == 1.0
    sizes = [rows[name].size for name in ("quantc", "fx-x86")]
    assert all(size is not None and 0.2 < size < 0.5 for size in sizes), sizes


def test_a_model_that_does_not_run_is_an_error() -> None:
    task = Task("odd", nn.Linear(3, 4), [(torch.ones(2, 5),)], [(torch.ones(2, 5),)])
    with pytest.raises(QuantcError, match="the model itself does not run"):
        measure(task, chosen(["quantc"]), 1, tell=silent)


def test_tools_that_quantize_nothing_say_so() -> None:
    class Sine(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return torch.sin(x)

    inputs = [(torch.randn(2, 3),)]
    found = measure(Task("sine", Sine(), inputs, inputs), chosen(["quantc", "fx-x86", "torch-dynamic"]), 1, tell=silent)
    reasons = {row.contender: row.reason for row in found.rows}
    assert not reasons.pop(EAGER)
    assert all(reasons.values()), reasons
    assert "quantized nothing" in reasons["fx-x86"]
    assert "quantized nothing" in reasons["torch-dynamic"]


def test_names_are_checked_and_the_float_model_is_always_there() -> None:
    assert list(chosen(["fx-x86"])) == [EAGER, "fx-x86"]
    assert list(chosen(None)) == list(CONTENDERS)
    with pytest.raises(UnknownNameError, match="quantc-tuned"):
        chosen(["quantc-tunned"])


def test_engines_outside_torch_refuse_with_the_extra() -> None:
    for name in ("onnxruntime", "openvino"):
        if not CONTENDERS[name].missing():
            continue
        with pytest.raises(MissingDependencyError, match=r"quantc\[bench\]"):
            CONTENDERS[name].make(tiny_task())


def test_weights_are_what_a_module_saves() -> None:
    layer = nn.Linear(256, 256, bias=False)
    assert 256 * 256 * 4 <= weights_of(nn.Sequential(layer, layer)) < 256 * 256 * 5, "what is tied counts once"
    for made in (nn.Sequential(nn.Linear(256, 256)), nn.Sequential(nn.LSTM(256, 256))):
        whole = weights_of(made)
        small = torch_dynamic(Task("", made, [], [])).weight_bytes
        assert small is not None
        assert 0.25 < small / whole < 0.3, "packed weights are counted as integers"


def test_errors_are_one_line() -> None:
    assert why(ValueError()) == "ValueError"
    assert why(QuantcError("what\nis it", advice="do  that")) == "what is it; do that"
    assert len(why(ValueError("x" * 999))) == 160


# -- the floor -------------------------------------------------------------------------------------------------


def test_the_floor_covers_every_op(outcome: Outcome) -> None:
    assert set(outcome.floors) == {"quantc", "quantc-tuned", "quantc-dynamic"}
    task = tiny_task()
    prepared = qc.prepare(qc.capture(task.model, task.calibration[0]), "x86")
    qc.calibrate(prepared, task.calibration, progress="silent")
    lowered = qc.lower(qc.convert(prepared), "x86")
    expected = lowered(*task.unseen[0])
    floor = kernel_floor(lowered, *task.unseen[0], rounds=1)
    modules = {node.name: node for node in lowered.module.graph.find_nodes(op="call_module")}
    kernels = [
        name for name, node in modules.items() if isinstance(lowered.module.get_submodule(str(node.target)), Kernel)
    ]
    by_node = {row.node: row for row in floor.ops}
    assert len(kernels) >= 3
    assert all(by_node[name].kernel for name in kernels)
    computed = [node.name for node in lowered.module.graph.nodes if node.op.startswith("call_")]
    assert list(by_node) == computed, "float ops as well, each once"
    assert all(row.microseconds > 0 for row in floor.ops)
    assert floor.milliseconds == pytest.approx(sum(row.microseconds for row in floor.ops) / 1e3)
    assert floor.share == pytest.approx(floor.milliseconds / floor.whole_milliseconds)
    assert sum(int(row[3]) for row in floor.rows()) == len(floor.ops)
    assert torch.equal(lowered(*task.unseen[0]), expected), "timing changes nothing"
    assert "conv" in floor.table()


# -- the chart -------------------------------------------------------------------------------------------------

ROWS = [
    Row("a <model>", EAGER, 2.0, 1.0, None, 1.0, 0.0),
    Row("a <model>", "quantc", 1.0, 2.0, 31.5, 0.25, 1.0),
    Row("a <model>", "openvino", reason="nncf & openvino are not installed"),
    Row("b", EAGER, 2.0, 1.0, None, 1.0, 0.0),
]


def test_the_chart_is_svg_with_bars_by_speed() -> None:
    root = ElementTree.fromstring(chart(ROWS))
    name = "{http://www.w3.org/2000/svg}"
    bars = [each for each in root.iter(f"{name}rect") if each.find(f"{name}title") is not None]
    widths = [float(bar.attrib["width"]) for bar in bars]
    assert len(widths) == 3
    assert widths[1] == pytest.approx(2 * widths[0], abs=0.2)
    text = " ".join(each.text or "" for each in root.iter(f"{name}text"))
    for part in ("a <model>", "31.5 dB", "nncf & openvino are not installed"):
        assert part in text


def test_a_page_has_the_chart_and_the_table(tmp_path: Path) -> None:
    write_plot(tmp_path / "new" / "bench.html", ROWS, ("model", "note"), [("a <model>", "x & y")])
    page = (tmp_path / "new" / "bench.html").read_text(encoding="utf-8")
    assert "<svg" in page
    assert "<td>a &lt;model&gt;</td><td>x &amp; y</td>" in page
    with pytest.raises(SaveError, match=r"\.svg"):
        write_plot(tmp_path / "bench.png", ROWS, (), ())


# -- models ----------------------------------------------------------------------------------------------------


def test_models_are_the_sizes_they_are_known_for() -> None:
    millions = {
        "resnet18": (resnet18(), 11.69),
        "mobilenetv2": (MobileNetV2(1000), 3.50),
        "efficientnet-lite0": (EfficientNetLite0(), 4.65),
        "vit-tiny": (ViT(), 5.72),
    }
    for name, (model, expected) in millions.items():
        count = sum(parameter.numel() for parameter in model.parameters())
        assert count / 1e6 == pytest.approx(expected, abs=0.01), name


def test_tasks_are_seeded_and_calibrate_with_other_inputs_than_they_measure_on() -> None:
    one, other, wide = task_of("lstm"), task_of("lstm"), task_of("lstm", batch=3)
    assert torch.equal(one.model.state_dict()["head.weight"], other.model.state_dict()["head.weight"])
    assert torch.equal(one.unseen[0][0], other.unseen[0][0])
    assert not torch.equal(one.unseen[0][0], one.calibration[0][0])
    assert wide.unseen[0][0].shape == (3, 64, 512)
    assert wide.name == "lstm, batch 3"


def test_random_weights_keep_activations_in_range() -> None:
    net = settled(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU6(), nn.Conv2d(8, 8, 3)), size=16)
    assert not net.training
    out = net(torch.randn(2, 3, 16, 16)).detach()
    assert 0.1 < float(out.std()) < 10
    small = initialised(ViT(width=32, heads=2, depth=1, image=32))
    assert float(small(torch.randn(1, 3, 32, 32)).detach().std()) > 0


def test_importing_quantc_imports_neither_this_nor_other_tools() -> None:
    code = """
import sys
import quantc
print([name for name in sys.modules if name.startswith(("quantc.bench", "torchao"))])
import quantc.cli.app
print([name for name in sys.modules if name.startswith(("quantc.bench.models", "quantc.bench.contenders", "torchao"))])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "[]"]
