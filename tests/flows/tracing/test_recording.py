"""Ways through a model that were seen, and those that were not: each is its own, or is refused by name and leaves nothing behind."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantc.errors import DataError
from quantc.flows.tracing import UnseenOpError, convert, prepare
from quantc.flows.tracing.run import ACTIVE
from tests.support.traced_models import TreeModule
from tests.support.traced_runs import Counted, sqnr, trace_of, tree

FILE = Path(__file__).name
PHASES = ("observing", "training", "converted")


def batch() -> Tensor:
    return torch.randn(8, 16)


def line_of(kind: type, text: str) -> str:
    """Where the only line of a class is that ends with a text."""
    lines, start = inspect.getsourcelines(kind)
    (found,) = [start + index for index, line in enumerate(lines) if line.rstrip().endswith(text)]
    return f"{FILE}:{found}"


def in_phase(model: nn.Module, phase: str, *examples: Tensor, **options: Any) -> nn.Module:
    made = prepare(model.eval(), list(examples), qat=phase == "training", **options)
    if phase == "training":
        for x in examples:
            made(x)
        return made.eval()
    with torch.no_grad():
        for x in examples:
            made(x)
        quantized = convert(made) if phase == "converted" else made
        for _ in range(4):  # until what is called next is guessed, and sequences are recorded
            for x in examples:
                quantized(x)
    return quantized


class Steps(nn.Module):
    """Between two layers, a third one in some form, or not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.layer, self.block = nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16), nn.ReLU())
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)
        self.between, self.after = "", ""

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        if self.between == "layer":
            x = self.layer(x)
        elif self.between == "block":
            x = self.block(x)
        elif self.between == "function":
            x = F.linear(x, self.weight)
        x = self.last(x)
        if self.after:
            x = self.block(x)
        return x


WAYS = {
    "a layer is left out": ("layer", "", "expected linear at"),
    "a block is left out": ("block", "", "expected a call of block, seen linear"),
    "a function is left out": ("function", "", "expected linear at"),
    "a layer comes as well": ("", "layer", "seen linear of layer"),
    "a function comes as well": ("", "function", "seen linear"),
    "a layer for a function": ("function", "layer", "seen linear of layer"),
}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("way", WAYS)
def test_ways_that_were_not_seen_are_refused_and_leave_nothing_behind(way: str, phase: str) -> None:
    torch.manual_seed(0)
    model, x = Steps(), batch()
    seen, unseen, said = WAYS[way]
    model.between = seen
    made: Any = in_phase(model, phase, x)
    before = made(x).detach()
    made.between = unseen
    for _ in range(2):
        with pytest.raises(UnseenOpError, match=said) as caught:
            made(x)
        place = {"": "self.last(x)", "layer": "self.layer(x)", "function": "F.linear(x, self.weight)"}[unseen]
        assert caught.value.where == line_of(Steps, f"x = {place}")
        assert "in the model (Steps)" in str(caught.value)
    made.between = seen
    assert torch.equal(made(x), before)


@pytest.mark.parametrize("phase", PHASES)
def test_an_end_that_was_not_seen_is_refused(phase: str) -> None:
    torch.manual_seed(0)
    model, x = Steps(), batch()
    model.after = "yes"
    made: Any = in_phase(model, phase, x)
    before = made(x).detach()
    made.after = ""
    with pytest.raises(UnseenOpError, match="expected a call of block, seen the end of forward"):
        made(x)
    made.after = "yes"
    assert torch.equal(made(x), before)


def test_the_error_names_all_that_was_seen() -> None:
    torch.manual_seed(0)
    model: Any = Steps().eval()

    class Tells(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Any:
            self.inner.between = {1.0: "layer", 2.0: "block"}.get(float(x.max()), "function")
            return self.inner(x)

    made = prepare(Tells().eval(), [torch.ones(2, 16), torch.full((2, 16), 2.0)])
    with torch.no_grad(), pytest.raises(UnseenOpError) as caught:
        made(torch.full((2, 16), 3.0))
    text = str(caught.value)
    layer = line_of(Steps, "x = self.layer(x)")
    assert (
        f"a call of inner.block or linear at {layer}" in text or f"linear at {layer} or a call of inner.block" in text
    )
    assert "in inner (Steps)" in text


class Order(nn.Module):
    """Blocks in an order that is given."""

    def __init__(self, blocks: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks() for _ in range(3))
        self.order = [0, 1, 2]

    def forward(self, x: Tensor) -> Any:
        for number in self.order:
            x = self.blocks[number](x)
        return x


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "layers": lambda: nn.Linear(16, 16),
    "blocks": lambda: nn.Sequential(nn.Linear(16, 16), nn.Tanh()),
}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("order", [[0, 2, 1], [1, 0, 2], [0, 1], [0, 1, 1, 2]])
def test_another_order_is_refused(order: list[int], kind: str, phase: str) -> None:
    torch.manual_seed(0)
    x = batch()
    made: Any = in_phase(Order(BLOCKS[kind]), phase, x)
    before = made(x).detach()
    made.order = order
    with pytest.raises(UnseenOpError, match="never seen"):
        made(x)
    made.order = [0, 1, 2]
    assert torch.equal(made(x), before)


class Joined(nn.Module):
    """A convolution runs between another and the sum that is fused with that."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.tail = (nn.Conv2d(4, 4, 1) for _ in range(3))
        self.weight = nn.Parameter(torch.randn(4, 4, 1, 1) / 2)
        self.more = True

    def forward(self, x: Tensor) -> Any:
        x = F.relu(self.stem(x))
        y, other = self.body(x), torch.zeros(())
        if self.more:
            other = F.conv2d(x, self.weight)
        return self.tail(F.relu(y + x)) - other


def test_sums_are_watched_as_the_op_is_that_they_are_part_of() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 6, 6)
    made: Any = in_phase(
        nn.Sequential(Joined()), "converted", x
    )  # what is called next is guessed inside of other modules
    with torch.no_grad():
        before = made(x)
        made[0].more = False
        with pytest.raises(UnseenOpError, match="expected conv2d at"):
            made(x)
        made[0].more = True
        assert torch.equal(made(x), before)


def test_a_call_that_is_refused_does_not_count() -> None:
    torch.manual_seed(0)
    model, x = Steps().eval(), batch()
    one: Any = prepare(model, x)
    other: Any = prepare(model, x)
    with torch.no_grad():
        one(x)
        other(x)
        other.between = "layer"
        with pytest.raises(UnseenOpError):
            other(x * 100)
        other.between = ""
        assert trace_of(other).held.plan.batches == 1
        assert torch.equal(convert(one)(x), convert(other)(x))
        with pytest.raises(DataError, match="NaN or infinite"):
            one(x / 0)
        assert trace_of(one).held.plan.batches == 1


class Catches(nn.Module):
    """Goes on after an error in one of its modules."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Any:
            x = self.layer(x)
            if float(x.abs().max()) > 6:
                raise ValueError("too large")
            return x

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = Catches.Inner(), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Any:
        try:
            y = self.inner(x)
        except ValueError:
            y = x
        return self.last(y)


@pytest.mark.parametrize("phase", ["observing", "converted"])
def test_errors_that_the_model_catches(phase: str) -> None:
    torch.manual_seed(0)
    model, small, large = Catches(), batch(), batch() * 8
    made = in_phase(model, phase, small, large)
    with torch.no_grad():
        for x in (small, large):
            assert sqnr(model(x), made(x)) > 18  # both share a scale


def test_an_error_in_tracing_leaves_other_models_alone() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Any:
            self.layer(x)
            raise ValueError("no")

    torch.manual_seed(0)
    model, x = Steps().eval(), batch()
    made = in_phase(model, "converted", x)
    with pytest.raises(ValueError, match="no"):
        prepare(Fails().eval(), x)
    assert ACTIVE.run is None  # it would hold the model, and take calls of others for its own
    with torch.no_grad():
        assert torch.equal(made.get_submodule("first")(x), model.first(x))  # by itself a layer is a layer


class TwoPlaces(nn.Module):
    """One block from two lines."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))

    def forward(self, x: Tensor) -> Any:
        x = self.block(x)
        return self.block(x * 100)


def test_blocks_called_from_two_places_have_scales_for_each() -> None:
    torch.manual_seed(0)
    model, x = TwoPlaces(), torch.randn(256, 16)
    made: Any = in_phase(model, "converted", x)
    rows = trace_of(made).held.plan.qparams
    scales = sorted(float(row.scale) for name, row in rows.items() if name.endswith("in0"))
    assert len(scales) == 4
    assert scales[2] > 20 * scales[1]
    assert len(made.block._auto_quant_state.subgraphs) == 2
    with torch.no_grad():
        assert sqnr(model(x), made(x)) > 25


def test_a_module_that_calls_itself_may_go_deeper_than_the_example() -> None:
    torch.manual_seed(0)
    model, example = TreeModule().eval(), tree(5)
    prepared = prepare(model, [(example,)])
    with torch.no_grad():
        prepared(example)
        quantized = convert(prepared)
        for depth in (1, 3, 8):
            other = tree(depth)
            assert sqnr(model(other), quantized(other)) > 22


class Weights(nn.Module):
    """A loop over functions whose weights differ from turn to turn."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(16, 16) * 4**number for number in range(3))

    def forward(self, x: Tensor) -> Any:
        for weight in self.weights:
            x = F.linear(x, weight)
        return x


def test_each_weight_of_a_loop_is_a_place_of_its_own() -> None:
    torch.manual_seed(0)
    model, x = Weights(), batch()
    made = in_phase(model, "converted", x)
    assert len([name for name in trace_of(made).held.plan.qparams if name.endswith("in0")]) == 3
    with torch.no_grad():
        prepared = convert_once(model, x)
        prepared(x)
        with Counted() as counted:
            found = prepared(x)
    assert (counted.int8, counted.float_products) == (3, 0)
    assert sqnr(model(x), found) > 25


def convert_once(model: nn.Module, x: Tensor) -> nn.Module:
    prepared = prepare(model, x)
    prepared(x)
    return convert(prepared)


class ReadsAgain(nn.Module):
    """What lies between a layer and its activation is read by another turn of a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        z = F.relu(y)
        for part in (x, y):
            z = z + torch.sin(part)
        return self.last(z)


def test_what_a_later_turn_reads_is_not_fused_away() -> None:
    torch.manual_seed(0)
    model, x = ReadsAgain().eval(), batch()
    with torch.no_grad():
        quantized = convert_once(model, x)
        quantized(x)
        with Counted() as counted:
            found = quantized(x)
    assert (counted.int8, counted.float_products) == (2, 0)
    assert sqnr(model(x), found) > 30


class Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Any:
        scope: dict[str, Any] = {}
        exec("def call(layer, x):\n    return layer(x)", scope)  # noqa: S102 (this is what is tested)
        self.kept = [*getattr(self, "kept", []), scope]  # or the next would lie at the same address
        return scope["call"](self.layer, x)


def test_code_that_is_made_anew_is_another_place() -> None:
    torch.manual_seed(0)
    made = prepare(Compiled().eval(), batch())
    with torch.no_grad(), pytest.raises(UnseenOpError, match="seen linear of layer"):
        made(batch())


class OwnThread(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Any:
        y, found = self.first(x), list[Tensor]()
        thread = threading.Thread(target=lambda: found.append(self.second(y.detach())))
        thread.start()
        thread.join()
        return found[0].detach() + y


def test_calls_in_threads_of_the_models_own_run_in_float() -> None:
    torch.manual_seed(0)
    model, x = OwnThread().eval(), batch()
    with torch.no_grad():
        quantized = convert_once(model, x)
        quantized(x)
        with Counted() as counted:
            found = quantized(x)
    assert counted.int8 == 1
    assert sqnr(model(x), found) > 30
