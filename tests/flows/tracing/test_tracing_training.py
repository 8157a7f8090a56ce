"""Training in the tracing flow, against the float model: norms, gradients, and who else holds the parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel

import quantc as qc
from quantc.errors import InputError
from quantc.flows.tracing import UnseenOpError, convert, prepare

SEEDED = torch.Generator().manual_seed(0)
ROWS, IMAGES = torch.randn(256, 8, generator=SEEDED), torch.randn(16, 3, 8, 8, generator=SEEDED)


class Made(nn.Module):
    """Layers by name, and a function of them."""

    def __init__(self, run: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def norm(make: Any = nn.BatchNorm1d) -> Any:
    """One with factors of either sign."""
    made = make(8)
    with torch.no_grad():
        made.weight.copy_(torch.tensor([1, -1, 2, -2, 0.5, -0.5, 1, 1.0]))
        made.bias.normal_()
    return made


def conv(channels: int = 8) -> nn.Conv2d:
    return nn.Conv2d(channels, 8, 3, padding=1)


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: row.grad for name, row in model.named_parameters() if not name.startswith("_auto")}


def _two(m: Any, x: Tensor) -> Any:
    y = m.n(m.a(x))
    return m.b(y) + m.c(y)


READERS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "linear": lambda: (nn.Sequential(nn.Linear(8, 8), norm(), nn.Linear(8, 4)), ROWS),
    "dropout": lambda: (nn.Sequential(nn.Linear(8, 8), norm(), nn.Dropout(0.2), nn.Linear(8, 4)), ROWS),
    "two": lambda: (Made(_two, a=nn.Linear(8, 8), n=norm(), b=nn.Linear(8, 4), c=nn.Linear(8, 4)), ROWS),
    "pool": lambda: (nn.Sequential(conv(3), norm(nn.BatchNorm2d), nn.MaxPool2d(2), conv()), IMAGES),
    "pad": lambda: (nn.Sequential(conv(3), norm(nn.BatchNorm2d), nn.ZeroPad2d(1), conv()), IMAGES),
    "sum": lambda: (
        Made(
            lambda m, x: torch.relu(m.n(m.a(x)) + m.o(m.b(x))),
            a=conv(3), n=norm(nn.BatchNorm2d), b=conv(3), o=norm(nn.BatchNorm2d),
        ),
        IMAGES,
    ),
}  # fmt: skip


@pytest.mark.parametrize("reader", READERS)
def test_a_norm_works_once_whoever_reads_it(reader: str) -> None:
    torch.manual_seed(0)
    model, x = READERS[reader]()
    prepared, plain = prepare(model.eval(), x, qat=True), copy.deepcopy(model).train()
    results = []
    for one in (prepared, plain):
        torch.manual_seed(1)
        results.append(one(x))
        results[-1].pow(2).mean().backward()
    assert (results[0] - results[1]).norm() < 0.1 * results[1].norm()
    found = gradients(prepared)
    for name, want in gradients(plain).items():
        if want is not None and want.norm() > 1e-3:  # a bias before a norm has none
            assert torch.cosine_similarity(found[name].flatten(), want.flatten(), 0) > 0.9, name  # type: ignore[union-attr]
    own = dict(prepared.named_buffers())
    for name, row in plain.named_buffers():
        torch.testing.assert_close(own[name], row, rtol=0.05, atol=0.05)


def test_what_is_read_without_gradients_first_has_them_later() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        h = m.encoder(x)
        with torch.no_grad():
            target = m.target(h)
        return m.online(h) - target  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = Made(run, encoder=nn.Linear(8, 8), target=nn.Linear(8, 8), online=nn.Linear(8, 8))
    prepared, plain = prepare(model.eval(), ROWS, qat=True), copy.deepcopy(model).train()
    for one in (prepared, plain):
        one(ROWS).pow(2).mean().backward()
    found, wanted = gradients(prepared), gradients(plain)
    assert {name for name, row in found.items() if row is None} == {"target.weight", "target.bias"}
    torch.testing.assert_close(found["encoder.weight"], wanted["encoder.weight"], rtol=0.1, atol=0.01)


def test_a_shared_norm_counts_where_it_is_not_folded_too() -> None:
    torch.manual_seed(0)
    model = Made(
        lambda m, x: m.h(m.n(torch.sigmoid(m.n(m.c(x)))).mean((2, 3))),
        c=conv(3), n=nn.BatchNorm2d(8, momentum=None), h=nn.Linear(8, 4),
    )  # fmt: skip
    plain: Any = copy.deepcopy(model).train()
    prepared: Any = prepare(model.eval(), IMAGES, qat=True)
    prepared(IMAGES), plain(IMAGES)
    assert int(prepared.n.num_batches_tracked) == 2
    torch.testing.assert_close(prepared.n.running_mean, plain.n.running_mean, rtol=0.05, atol=0.01)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()


def test_functional_call_computes_with_what_it_is_given() -> None:
    prepared = prepare(mlp(), ROWS, qat=True)
    prepared(ROWS)
    prepared.eval()
    twin = copy.deepcopy(prepared)
    with torch.no_grad():
        for row in twin.parameters():
            row.mul_(1.5)
    given = {name: (row.detach() * 1.5).requires_grad_() for name, row in prepared.named_parameters()}
    before = prepared(ROWS)
    found = torch.func.functional_call(prepared, given, (ROWS,))
    torch.testing.assert_close(found, twin(ROWS), rtol=0, atol=0)
    found.sum().backward()
    assert all(row.grad is not None for row in given.values())
    again = prepared(ROWS)
    torch.testing.assert_close(again, before, rtol=0, atol=0)
    again.sum().backward()
    assert all(row.grad is not None for row in prepared.parameters())


def test_learned_scales_that_were_copied_are_kept() -> None:
    config = qc.QuantConfig().set_all(qc.UINT8.but(observe="lsq-plus"))
    prepared = prepare(mlp(), ROWS, qat=True, config=config)
    average = AveragedModel(prepared)
    prepared(ROWS)
    average.update_parameters(prepared)  # the first time, it copies
    prepared.eval(), average.eval()
    torch.testing.assert_close(average(ROWS * 10), prepared(ROWS * 10), rtol=0, atol=0)


class Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        return self.second(torch.relu(functional.linear(x, self.first.weight.detach(), self.first.bias)))


def test_weights_without_gradients_are_refused_unless_frozen() -> None:
    model = Detached().eval()
    with pytest.raises(InputError, match=r"first\.weight without gradients"):
        prepare(model, ROWS, qat=True)(ROWS)
    model.first.weight.requires_grad_(False)
    prepare(model, ROWS, qat=True)(ROWS).sum().backward()


def _half(m: Any, x: Tensor) -> Any:
    with torch.no_grad():
        y = m.a(x)
    return m.h(torch.relu(m.n(y)))


def test_fused_ops_partly_without_gradients_are_refused() -> None:
    model = Made(_half, a=nn.Linear(8, 8), n=nn.BatchNorm1d(8), h=nn.Linear(8, 4))
    with pytest.raises(InputError, match="one of them is under"):
        prepare(model.eval(), ROWS, qat=True)(ROWS)


class Noisy(nn.Module):
    """Does more in training than its examples show, before a norm or behind it."""

    def __init__(self, behind: bool) -> None:
        super().__init__()
        self.behind = behind
        self.stem, self.conv, self.norm = conv(3), conv(), nn.BatchNorm2d(8)

    def noise(self, x: Tensor, here: bool) -> Tensor:
        return x * (torch.rand(len(x), 1, 1, 1) > 0.2) if self.training and here else x

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        y = self.noise(self.norm(self.noise(self.conv(x), not self.behind)), self.behind)
        return torch.relu(x + y)


@pytest.mark.parametrize("behind", [False, True])
def test_a_norm_that_would_learn_twice_or_never_is_refused(behind: bool) -> None:
    prepared: Any = prepare(Noisy(behind).eval(), IMAGES, qat=True)
    with pytest.raises(UnseenOpError, match="another tensor in training"):
        prepared(IMAGES)
    prepared.norm.eval()
    prepared(IMAGES).sum().backward()


def test_a_train_of_the_models_own_may_give_nothing() -> None:
    class Frozen(nn.Sequential):
        def train(self, mode: bool = True) -> Any:
            super().train(mode)
            self[1].eval()

    model = Frozen(nn.Linear(8, 8), nn.BatchNorm1d(8))
    model.eval()
    prepared: Any = prepare(model, ROWS, qat=True)
    assert not prepared[1].training


@torch.no_grad()
def rounded(x: Tensor) -> Tensor:
    """A tensor on the uint8 grid of its own range, by torch."""
    low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
    scale = (high - low) / 255
    return torch.fake_quantize_per_tensor_affine(x, scale, round(-low / scale), 0, 255)


@torch.no_grad()
def rounded_rows(weight: Tensor) -> Tensor:
    scale = weight.abs().amax(1) / 127
    return torch.fake_quantize_per_channel_affine(
        weight, scale, torch.zeros(len(weight), dtype=torch.int32), 0, -127, 127
    )


def test_results_are_rounded_where_the_backend_gives_them_so() -> None:
    torch.manual_seed(0)
    model: Any = mlp()
    prepared = prepare(model, ROWS, backend="qnnpack", qat=True)
    found = prepared(ROWS)
    found.sum().backward()
    hidden = torch.relu(functional.linear(rounded(ROWS), rounded_rows(model[0].weight), model[0].bias))
    wanted = rounded(functional.linear(rounded(hidden), rounded_rows(model[2].weight), model[2].bias))
    step = (wanted.max() - wanted.min()) / 255
    assert (found - wanted).abs().max() < 1.1 * step
    assert len(found.unique()) <= 256
    assert all(row.grad is not None for row in prepared.parameters())


def _shared(m: Any, x: Tensor) -> Any:
    y = m.a(x)
    z = (torch.relu(y) + y).clone()
    return m.b(z), z.sigmoid(), y


def _in_place(m: Any, x: Tensor) -> Any:
    return m.b(torch.relu(m.a(x)).sub_(1).exp_())


YIELDED: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "mlp": lambda: (mlp(), ROWS),
    "norms": lambda: (nn.Sequential(conv(3), norm(nn.BatchNorm2d), nn.ReLU(), conv(), norm(nn.BatchNorm2d)), IMAGES),
    "pool": lambda: (nn.Sequential(conv(3), nn.ReLU(True), nn.MaxPool2d(2)), IMAGES),
    "average": lambda: (nn.Sequential(conv(3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()), IMAGES),
    "joined": lambda: (Made(lambda m, x: torch.cat([m.a(x), m.b(x)], 1), a=conv(3), b=conv(3)), IMAGES),
    "shared": lambda: (Made(_shared, a=nn.Linear(8, 8), b=nn.Linear(8, 8)), ROWS),
    "in place": lambda: (Made(_in_place, a=nn.Linear(8, 8), b=nn.Linear(8, 8)), ROWS),
}


@pytest.mark.parametrize("name", YIELDED)
def test_what_is_trained_for_qnnpack_is_what_is_converted(name: str) -> None:
    torch.manual_seed(0)
    model, x = YIELDED[name]()
    prepared = prepare(model.eval(), x, backend="qnnpack", qat=True)
    program: Any = qc.prepare(qc.capture(copy.deepcopy(model).train(), (x,)), "qnnpack", qat=True)
    for batch in (x, x * 0.8, x + 0.1):  # each counts once
        found, wanted = prepared(batch), program(batch)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    with torch.no_grad():
        before, after = prepared.eval()(x), convert(prepared)(x)
    for one, other in zip(*((row if isinstance(row, tuple) else (row,)) for row in (before, after)), strict=True):
        step = one.unique().diff().min()
        assert (one - other).abs().max() < 4.5 * step  # what lies between two levels may fall to either, op by op
        assert (one == other).float().mean() > 0.95


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_train_in_the_mode_of_their_module(kind: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 6, 8)
    model = Made(lambda m, x: m.h(m.r(x)[0]), r=kind(8, 8, 2, dropout=0.5, batch_first=True), h=nn.Linear(8, 4))
    prepared: Any = prepare(model.eval(), x, qat=True)
    plain: Any = copy.deepcopy(model).train()
    for one in (prepared, plain):
        torch.manual_seed(1)  # the same elements are dropped
        one(x).pow(2).mean().backward()
    wanted = gradients(plain)
    for name, found in gradients(prepared).items():
        assert torch.cosine_similarity(found.flatten(), wanted[name].flatten(), 0) > 0.99, name  # type: ignore[union-attr]
    prepared.r.eval(), plain.r.eval()
    torch.testing.assert_close(prepared(x), plain(x), rtol=0.05, atol=0.03)
    with torch.no_grad():
        before = prepared.eval()(x)
        torch.testing.assert_close(convert(prepared)(x), before, rtol=0, atol=1e-2)


def _adapted(m: Any, x: Tensor) -> Any:
    return m.h(torch.relu(functional.linear(x, m.w.weight + m.up.weight @ m.down.weight, m.w.bias)))


def _scaled(m: Any, x: Tensor) -> Any:
    return m.h(torch.relu(functional.linear(x, m.w.weight * m.up.weight.sum(1, keepdim=True), m.w.bias)))


@pytest.mark.parametrize("backend", ["x86", "qnnpack"])
@pytest.mark.parametrize("run", [_adapted, _scaled])
def test_weights_that_are_computed_of_others_are_trained_and_converted(run: Any, backend: str) -> None:
    torch.manual_seed(0)
    layers = {"w": nn.Linear(8, 8), "h": nn.Linear(8, 4), "up": nn.Linear(2, 8), "down": nn.Linear(8, 2)}
    model = Made(run, **layers)
    prepared, plain = prepare(model.eval(), ROWS, backend=backend, qat=True), copy.deepcopy(model).train()
    results = [one(ROWS) for one in (prepared, plain)]
    for result in results:
        result.pow(2).mean().backward()
    assert (results[0] - results[1]).norm() < 0.05 * results[1].norm()
    found = gradients(prepared)
    for name, want in gradients(plain).items():
        if want is not None:
            assert torch.cosine_similarity(found[name].flatten(), want.flatten(), 0) > 0.95, name  # type: ignore[union-attr]
    with torch.no_grad():
        before = prepared.eval()(ROWS)
        after = convert(prepared)(ROWS)
    assert (before - after).abs().max() < 0.02 * (before.max() - before.min())


def test_what_is_frozen_in_a_model_that_trains_stays_so() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(conv(3), norm(nn.BatchNorm2d), nn.ReLU(), nn.Sequential(conv(), norm(nn.BatchNorm2d))).train()
    model[1].eval()
    prepared: Any = prepare(model, IMAGES, qat=True)
    assert [name for name, row in prepared.named_modules() if not row.training] == ["1"]
    found, wanted = prepared(IMAGES), model(IMAGES)
    assert (found - wanted).norm() < 0.1 * wanted.norm()
    own = dict(prepared.named_buffers())
    for name, row in model.named_buffers():
        torch.testing.assert_close(own[name], row, rtol=0.05, atol=0.05)
    assert int(own["1.num_batches_tracked"]) == 0
    thawed: Any = prepare(model.eval(), IMAGES, qat=True)  # nothing says that one of them is to stay so
    assert all(row.training for row in thawed.modules())


class Aux(nn.Module):
    """Has a second head in training."""

    def __init__(self, aux: nn.Module, in_one_place: bool) -> None:
        super().__init__()
        self.body, self.head, self.aux, self.in_one_place = nn.Linear(8, 8), nn.Linear(8, 4), aux, in_one_place

    def forward(self, x: Tensor) -> Any:
        y = self.body(x).relu()
        if not self.in_one_place and self.training:
            return self.head(y), self.aux(y)
        z = self.head(y)
        return (z, self.aux(y)) if self.training else (z,)


@pytest.mark.parametrize("aux", [nn.Linear(8, 4), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))])
@pytest.mark.parametrize("in_one_place", [True, False])
def test_what_only_training_calls_is_a_leaf_by_the_advice(aux: nn.Module, in_one_place: bool) -> None:
    model = Aux(aux, in_one_place).train()
    leaves: list[str] = []
    for wanted in ([] if in_one_place else ["head"]) + ["aux"]:
        with pytest.raises(UnseenOpError, match=f"leaf='{wanted}'"):
            prepare(model, ROWS, qat=True, leaf=leaves)(ROWS)
        leaves.append(wanted)
    prepared: Any = prepare(model, ROWS, qat=True, leaf=leaves)
    results, plain = prepared(ROWS), model(ROWS)
    for one, other in zip(results, plain, strict=True):
        assert (one - other).norm() < 0.05 * other.norm()
    torch.cat([row.flatten() for row in results]).sum().backward()  # type: ignore[no-untyped-call]
    assert all(row.grad is not None for row in prepared.parameters())
    with torch.no_grad():
        (before,) = prepared.eval()(ROWS)
        (after,) = convert(prepared)(ROWS)
    torch.testing.assert_close(after, before, rtol=0, atol=0.02)


@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hooks_have_gradients_or_are_refused_by_name(kind: str) -> None:
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Linear(8, 8), norm(), nn.ReLU())
    model = nn.Sequential(stem, nn.Sequential(nn.Linear(8, 8), nn.ReLU(True)), nn.Linear(8, 4)).eval()

    def seen(one: nn.Module, path: str) -> Tensor:
        found: list[Tensor] = []
        getattr(one.get_submodule(path), kind)(lambda _, *rows: found.append(rows[-1][0]))
        one(ROWS).pow(2).mean().backward()
        return found[0].flatten()

    for path in ("0", "2", ""):  # what reads a tensor that was written in place, too
        found, wanted = seen(prepare(model, ROWS, qat=True), path), seen(copy.deepcopy(model).train(), path)
        assert torch.cosine_similarity(found, wanted, 0) > 0.95
    for path in ("0.0", "0.1", "0.2", "1"):
        with pytest.raises(InputError, match=f"^{path} has a backward hook"):
            seen(prepare(model, ROWS, qat=True), path)
