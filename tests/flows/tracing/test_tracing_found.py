"""What a search over random and realistic models has found in the tracing flow: each case is the smallest that showed it."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantc.errors import AnnotationError, CaptureError, InputError, QuantcError
from quantc.flows.tracing import convert, coverage, prepare, to_program
from tests.support.traced_runs import floats, sqnr, trace_of


class Convs(nn.Module):
    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.convs: Any = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(count))


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)


def image(scale: float = 1.0) -> Tensor:
    return (torch.rand(2, 4, 6, 6) * 2 - 1) * scale


def rows() -> Tensor:
    return torch.rand(16, 8) * 2 - 1


def held_to(model: nn.Module, inputs: Callable[[int], Tensor], examples: int = 1, above: float = 25) -> nn.Module:
    """Prepare and convert a model, and hold both to it: what they give, and what they write to their input."""
    model = model.eval()
    given = [inputs(number) for number in range(8)]
    prepared = prepare(model, [x.clone() for x in given[:examples]])
    with torch.no_grad():
        for x in given:
            theirs, ours = x.clone(), x.clone()
            assert sqnr(model(theirs), prepared(ours)) > 80
            torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)
        quantized = convert(prepared)
        for x in given * 2:
            theirs, ours = x.clone(), x.clone()
            assert sqnr(model(theirs), quantized(ours)) > above
            assert sqnr(theirs, ours) > above
    return quantized


class DeadProduct(Convs):
    """What the product is made of was taken for folded into a convolution, as nothing read the product."""

    def forward(self, x: Tensor) -> Any:
        y = self.convs[0](x)
        str(x)
        x.copy_(y * 0.5)
        return self.convs[1](y)


class ScaledByData(Convs):
    def forward(self, x: Tensor) -> Any:
        y = self.convs[0](x)
        self.convs[1](y / max(0.25, y.abs().max().item()))
        return self.convs[2](x)


class WritesInAnyOrder(Convs):
    """The branch is seen by the second example: in the graph it comes after what is written at the end."""

    def forward(self, x: Tensor) -> Any:
        y = F.relu(self.convs[0](x))
        if x.std().item() > 1:
            y = self.convs[1](y)
        y[y < 0.1] = 0
        return self.convs[2](y)


class WritesToWhatVaries(Convs):
    def forward(self, x: Tensor) -> Any:
        y = self.convs[0](x)
        if x.std().item() > 1:
            y = y * 0.5
        y *= 0.5
        return y


class AddsItself(Convs):
    def forward(self, x: Tensor) -> Any:
        y = x.flip(1)
        y.chunk(2, 1)[0].add_(0.25)
        y.add_(y)
        return self.convs[0](y)


class DoneBefore(Convs):
    """A sum reads floats of an op that was put off and is done by then."""

    def forward(self, x: Tensor) -> Any:
        y = self.convs[0](x)
        if x.std().item() > 1:
            y = y * x
        z = F.conv2d(y, self.convs[1].weight, padding=1)
        y.flatten()[:5] = 0.5
        w = F.relu(x)
        w.add_(z)
        return F.relu(y + x) + w


@pytest.mark.parametrize(
    "kind", [DeadProduct, ScaledByData, WritesInAnyOrder, WritesToWhatVaries, AddsItself, DoneBefore]
)
def test_numbers(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    quantized = held_to(kind(), lambda number: image(1 + 2 * (number % 2)), examples=2)
    products = [unit for unit in trace_of(quantized).units.values() if unit.is_product]
    assert products


class Joined(Convs):
    """The first call of a module's own is a function of two tensors, which a later call guesses."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Joins()

    def forward(self, x: Tensor) -> Any:
        return self.block(self.convs[0](x))


class Joins(Convs):
    def forward(self, x: Tensor) -> Any:
        return F.relu(F.conv2d(x, self.convs[0].weight, padding=1) + x)


def test_a_model_that_has_run_can_be_copied() -> None:
    torch.manual_seed(0)
    quantized = held_to(Joined(), lambda _: image())
    x = image()
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(quantized)(x), quantized(x))


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Any:  # noqa: A002 - as torch calls it
        return super().forward(input) * 0.5 + 1


class OwnLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Scaled(8, 8), Scaled(8, 8)

    def forward(self, x: Tensor) -> Any:
        return self.second.forward(F.relu(self.first(x)))


class Detaches(Rows):
    def forward(self, x: Tensor) -> Any:
        y = self.first(x)
        return self.second(y - y.mean(0).detach())


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x[None])[0]


@pytest.mark.parametrize("kind", [OwnLayers, Detaches, Attends])
def test_models_that_can_be_trained(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = kind().eval()
    prepared = prepare(model, rows(), qat=True)
    for _ in range(8):
        prepared(rows()).square().mean().backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in prepared.parameters())
    x = rows()
    with torch.no_grad():
        expected = prepared.eval()(x)
        assert sqnr(expected, convert(prepared)(x)) > 25
        assert sqnr(model(x), convert(prepared)(x)) > 20


class Remembers(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.past: Tensor | None = None
        self.seen: list[Tensor] = []
        self.register_buffer("count", torch.zeros(()))
        self.count: Tensor

    def forward(self, x: Tensor) -> Any:
        self.count += 1
        y = F.relu(self.first(x))
        y = y if self.past is None else y + 0.5 * self.past
        self.past = y
        self.seen.append(y)
        return self.second(y)


def test_prepare_leaves_the_state_of_a_model_as_it_was() -> None:
    torch.manual_seed(0)
    model = Remembers().eval()
    prepared: Any = prepare(model, [rows(), rows()])
    assert prepared.past is None
    assert prepared.seen == []
    assert prepared.count == 0
    with torch.no_grad():
        for number in range(8):
            x = rows()
            assert sqnr(model(x), prepared(x)) > 80
            assert sqnr(model.seen[number], prepared.seen[number]) > 80
        quantized: Any = convert(prepared)
        assert quantized.count == 8
        for number in range(8, 12):
            x = rows()
            assert sqnr(model(x), quantized(x)) > 20
            assert sqnr(model.seen[number], quantized.seen[number]) > 20


def test_a_model_that_keeps_tensors_with_gradients_can_be_prepared_and_converted() -> None:
    torch.manual_seed(0)
    model = Remembers().eval()
    model(rows())
    assert model.past is not None
    assert model.past.requires_grad
    prepared = prepare(model, rows())
    prepared(rows())
    with torch.no_grad():
        convert(prepared)(rows())


class InThreads(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Sequential(nn.Linear(8, 4), nn.ReLU()) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        with ThreadPoolExecutor(2) as pool:
            parts = list(pool.map(lambda branch: branch(x), self.branches))
        return self.second(torch.cat(parts, -1))


def test_layers_that_are_called_in_threads_stay_float_and_are_named() -> None:
    torch.manual_seed(0)
    model = InThreads().eval()
    with pytest.warns(UserWarning, match=r"branches\.0.*called in threads that the model starts itself"):
        prepared = prepare(model, rows())
    given = [rows() for _ in range(8)]
    with torch.no_grad():
        for x in given:
            assert sqnr(model(x), prepared(x)) > 80
        assert sqnr(model(given[0]), convert(prepared)(given[0])) > 25
    with pytest.raises(CaptureError, match="thread"):
        to_program(prepared)


class Record(OrderedDict[str, Any]):
    """A dict of a class that torch does not know."""


class GivesRecord(Rows):
    def forward(self, x: Tensor) -> Any:
        return Record(made=self.second(F.relu(self.first(x))))


def test_results_in_containers_of_the_models_own() -> None:
    torch.manual_seed(0)
    model = GivesRecord().eval()
    prepared = prepare(model, rows())
    given = [rows() for _ in range(8)]
    with torch.no_grad():
        for x in given:
            assert sqnr(model(x)["made"], prepared(x)["made"]) > 80
        quantized = convert(prepared)
        assert len(trace_of(quantized).units) >= 2
        assert sqnr(model(given[0])["made"], quantized(given[0])["made"].clone()) > 25


class Packed(nn.Module):
    """What the recurrent layer gives has no form in ATen, and the layer behind it reads floats all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRU(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        packed = nn.utils.rnn.pack_padded_sequence(x[:, None].expand(-1, 2, -1), [16, 5])
        made, _ = nn.utils.rnn.pad_packed_sequence(self.cell(packed)[0])
        return self.head(made)


def test_layers_behind_what_has_no_graph_are_quantized() -> None:
    torch.manual_seed(0)
    quantized = held_to(Packed(), lambda _: rows())
    assert "1 quantized" in str(coverage(quantized))


class Scripted(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.middle = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))

    def forward(self, x: Tensor) -> Any:
        return self.second(self.middle(self.first(x)))


def test_scripted_modules_stay_as_they_are() -> None:
    torch.manual_seed(0)
    held_to(Scripted(), lambda _: rows())


class Forces(Rows):
    """A potential, and its gradient: of the quantized layers' part nothing would be in it."""

    def forward(self, x: Tensor) -> Any:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.second(F.relu(self.first(x))).square().sum() + x.sum()
            return torch.autograd.grad(energy, x)[0]


def test_gradients_within_a_converted_model_are_refused() -> None:
    torch.manual_seed(0)
    model = Forces().eval()
    prepared = prepare(model, rows())
    x = rows()
    assert sqnr(model(x), prepared(x)) > 80
    quantized = convert(prepared)
    for _ in range(3):
        with pytest.raises(InputError, match="asks for gradients"):
            quantized(x)


class Mapped(Rows):
    def forward(self, x: Tensor) -> Any:
        return torch.vmap(self.second)(F.relu(self.first(x)))


def test_layers_within_vmap_are_refused_by_name() -> None:
    with pytest.raises(CaptureError, match=r"linear at .* is called within torch\.vmap"):
        prepare(Mapped().eval(), rows())


class GoesThroughModules(nn.Sequential):
    def forward(self, input: Any) -> Any:  # noqa: A002 - as torch calls it
        modules: Any = self._modules
        x = input
        for module in modules.values():
            x = module(x)
        return x


def test_a_model_that_goes_through_its_modules_is_told_what_to_do() -> None:
    with pytest.raises(QuantcError, match="_modules"):
        prepare(GoesThroughModules(nn.Linear(8, 8)).eval(), rows())


class SumsAll(Rows):
    def forward(self, *given: Tensor) -> Any:
        total: Any = sum(self.first(x) for x in given)
        return self.second(F.relu(total))


def test_a_later_example_may_have_more_inputs() -> None:
    torch.manual_seed(0)
    model = SumsAll().eval()
    prepared = prepare(model, [(rows(),), (rows(), rows(), rows())])
    names = [str(node.target) for node in trace_of(prepared).held.graph.find_nodes(op="placeholder")]
    assert [name for name in names if name.startswith("input_")] == ["input_0", "input_1", "input_2"]
    with torch.no_grad():
        for count in (1, 2, 3) * 3:
            given = [rows() for _ in range(count)]
            assert sqnr(model(*given), prepared(*given)) > 80
        quantized = convert(prepared)
        for count in (1, 2, 3):
            given = [rows() for _ in range(count)]
            assert sqnr(model(*given), floats(quantized(*given))[0]) > 25


def test_advice_fits_the_flow() -> None:
    with pytest.raises(AnnotationError, match=r"explain\(prepared, node\)"):
        prepare(nn.Sequential(nn.Softmax(-1)).eval(), rows())


def test_what_is_compiled_as_it_runs_is_refused_by_name() -> None:
    class Chooses(Rows):
        def forward(self, x: Tensor) -> Any:
            x = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
            return self.second(F.relu(self.first(x)))

    with pytest.raises(CaptureError, match=r"torch\.cond") as caught:
        prepare(Chooses().eval(), rows())
    assert "branch in Python" in str(caught.value)


def test_errors_of_the_model_are_its_own() -> None:
    class Wrong(Rows):
        def forward(self, x: Tensor) -> Any:
            return self.second(self.first(x)[:, :3])

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        prepare(Wrong().eval(), rows())
