"""Whole models on kernels: what they compute, whatever they are given, and what they leave alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import quantc as qc
from quantc.targets.kernels.kernel_agreement import kernel_agreement
from quantc.testing.loose_pairs import loose_pairs
from tests import zoo
from tests.support import architectures
from tests.zoo.case import Case, detached

TARGETS = ("x86", "qnnpack")
CLOSE = 2e-6
"""How far floats may be off, relative to the largest."""
MIN_DECIBELS = {"few": 38.0, "many": 25.0}
"""How close a model on kernels is to the integer form, by how often its kernels are a step off. Averages and sums of bytes
often lie halfway between two levels, where either is right; a model carries that on, and one step of 255 is 36 dB below
the most that a tensor can hold."""
OFTEN = 0.005
"""Which part of the bytes of a kernel is many."""
CALIBRATION = (0, 1, 2)
STATEFUL = frozenset({"counter", "moving_average", "cache", "Counter", "MovingAverage", "Cache"})
"""Models that remember what they were given: no two calls are alike. By the name of the case, and of the class."""
RETURNS_STATE = frozenset({"pass_through"})
"""Models that hand out a parameter of their own."""
ENTERS_BRANCHES = frozenset({"cond"})
"""Models whose branches depend on the data; see tests/ir/test_subgraphs.py."""
WRITES_INPUTS = frozenset(case.name for case in zoo.CASES if "writes_input" in case.name or "maybe_copy" in case.name)
"""Models that write to what they are given."""

CASES: dict[str, Case] = {
    **{f"zoo {case.name}": case for case in zoo.CASES if case.name not in ENTERS_BRANCHES},
    **{case.name: case for case in architectures.CASES},
}
FAST = ("mobilenet_v3", "unet", "vit", "bert", "conformer", "wavenet", "dlrm", "zoo audio_conv1d", "zoo video_conv3d",
        "zoo conv_transpose_decoder", "zoo exotic_convs", "zoo resnet_downsample", "zoo pools", "zoo tied_weights",
        "zoo shared_module", "zoo dense_block", "zoo functional_conv_net", "zoo lstm_tagger", "zoo pass_through",
        "zoo max_unpool", "zoo super_resolution", "zoo keyword_inputs_all", "zoo spell_moves")  # fmt: skip
"""Those that between them have every kind of kernel. The others are looked at by the slow tests."""


def each(*names: str, slow: bool = True) -> pytest.MarkDecorator:
    """A test for some models on every target, and a slow one for all the others."""
    rest = [name for name in CASES if name not in names] if slow else []
    fast = [pytest.param(name, target, id=f"{name} {target}") for name in names for target in TARGETS]
    marks = [
        pytest.param(name, target, id=f"{name} {target}", marks=pytest.mark.slow) for name in rest for target in TARGETS
    ]
    return pytest.mark.parametrize(("name", "target"), [*fast, *marks])


@dataclass(frozen=True)
class Subject:
    """A model on kernels, and what it is given."""

    lowered: qc.Lowered
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def leaves(self) -> list[Tensor]:
        return tensors((self.args, self.kwargs))


@cache
def converted(name: str, target: str) -> qc.Program:
    case = CASES[name]
    args, kwargs = case.example()
    prepared = qc.prepare(qc.capture(case.model(), args, example_kwargs=kwargs or None), target, allow_empty=True)
    batches = [case.example(seed) for seed in CALIBRATION]
    qc.calibrate(prepared, [(*given, *keywords.values()) for given, keywords in batches], progress="silent")
    return qc.convert(prepared, reduce_range="weights")


def subject(name: str, target: str, seed: int = 3) -> Subject:
    """A model, freshly lowered."""
    args, kwargs = CASES[name].example(seed)
    return Subject(qc.lower(converted(name, target), target), args, kwargs)


pytestmark = pytest.mark.usefixtures("no_grad")


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def decibels(exact: Any, found: Any) -> float:
    """Signal to noise of what was found, over all outputs."""
    pairs = [(a.double(), b.double()) for a, b in zip(tensors(exact), tensors(found), strict=True)]
    finite = [(a[a.isfinite()], b[a.isfinite()]) for a, b in pairs]
    noise = sum(float(((a - b) ** 2).sum()) for a, b in finite)
    signal = sum(float((a**2).sum()) for a, _ in finite)
    if noise == 0:
        return float("inf")
    return 10 * float(torch.log10(torch.tensor(signal / noise, dtype=torch.float64))) if signal else -float("inf")


def check_kernels(lowered: qc.Lowered, *args: Any, **kwargs: Any) -> None:
    """Each kernel is within a step of its op, and the whole is close to the integer form."""
    gaps = kernel_agreement(lowered, *detached(args), **detached(kwargs))
    assert all(gap.steps <= 1 and gap.relative <= CLOSE for gap in gaps), "\n".join(map(str, gaps))
    if lowered.program.name in STATEFUL:
        return
    exact = lowered.program(*detached(args), **detached(kwargs))
    found = lowered(*detached(args), **detached(kwargs))
    for _ in range(3):  # as one function, which the first call has written; then from a recording
        again = lowered(*detached(args), **detached(kwargs))
        assert all(torch.equal(a, b) for a, b in zip(tensors(found), tensors(again), strict=True))
    pairs = list(zip(tensors(exact), tensors(found), strict=True))
    assert [(a.shape, a.dtype, a.stride()) for a, _ in pairs] == [(b.shape, b.dtype, b.stride()) for _, b in pairs]
    is_often = any(gap.differing > OFTEN for gap in gaps)
    assert decibels(exact, found) > MIN_DECIBELS["many" if is_often else "few"], "\n".join(map(str, gaps))


# -- what they compute ---------------------------------------------------------------------------------------------


@each(*FAST)
def test_every_kernel_is_its_op_and_the_model_is_its_integer_form(name: str, target: str) -> None:
    model = subject(name, target)
    check_kernels(model.lowered, *model.args, **model.kwargs)


@each(*FAST)
def test_nothing_becomes_float_between_two_quantized_ops_for_no_reason(name: str, target: str) -> None:
    assert loose_pairs(subject(name, target).lowered) == ()


# -- what they leave alone -----------------------------------------------------------------------------------------


@each(*FAST)
def test_a_call_changes_neither_inputs_nor_the_next_call(name: str, target: str) -> None:
    if CASES[name].name in STATEFUL | WRITES_INPUTS | RETURNS_STATE:
        pytest.skip("the model itself does so")
    model = subject(name, target)
    before = [leaf.clone() for leaf in model.leaves]
    first = model.lowered(*model.args, **model.kwargs)
    assert all(torch.equal(a, b) for a, b in zip(before, model.leaves, strict=True))
    kept = [leaf.clone() for leaf in tensors(first)]
    for leaf in tensors(first):
        if not shares(leaf, model.leaves):  # a model may hand on what it was given
            leaf.zero_()
    again = model.lowered(*model.args, **model.kwargs)
    for wanted, found in zip(kept, tensors(again), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def shares(leaf: Tensor, others: list[Tensor]) -> bool:
    return any(leaf.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() for other in others)


# -- whatever they are given ---------------------------------------------------------------------------------------


def channels_last(x: Tensor) -> Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.to(memory_format=formats[x.dim()]) if x.dim() in formats else x


def strided(x: Tensor) -> Tensor:
    """The same numbers, each beside one that is not read."""
    wide = torch.stack([x, torch.zeros_like(x)], dim=-1)
    return wide[..., 0]


def turned(x: Tensor) -> Tensor:
    """The same numbers, the last two axes swapped in memory."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2) if x.dim() > 1 else x


def offset(x: Tensor) -> Tensor:
    """The same numbers, not at the start of their memory."""
    return torch.cat([torch.zeros(1, dtype=x.dtype), x.flatten()])[1:].view(x.shape)


@each(*FAST)
def test_how_inputs_lie_in_memory_makes_no_difference(name: str, target: str) -> None:
    if CASES[name].name in STATEFUL | WRITES_INPUTS:
        pytest.skip("the model itself depends on it")
    model = subject(name, target)
    wanted = model.lowered(*model.args, **model.kwargs)
    for lie in (channels_last, strided, turned, offset):
        args, kwargs = pytree.tree_map(
            lambda x, lie=lie: lie(x) if isinstance(x, Tensor) else x, (model.args, model.kwargs)
        )
        found = model.lowered(*args, **kwargs)
        for one, other in zip(tensors(wanted), tensors(found), strict=True):
            # what stays float sums in another order over other memory, and small results of large terms show it: of a GRU
            # with a turned state the float model itself is off by 6e-8
            is_float = one.is_floating_point() and bool(one.isfinite().any())
            largest = float(one[one.isfinite()].abs().max()) if is_float else 0.0
            told = lambda text, lie=lie: f"{lie.__name__}: {text}"  # noqa: E731
            torch.testing.assert_close(other, one, rtol=0, atol=CLOSE * largest, equal_nan=True, msg=told)


def test_rows_that_are_one_row_repeated_are_read_as_such() -> None:
    for target in TARGETS:
        model = subject("vit", target)
        (x,) = model.args
        repeated = x[:1].expand(x.shape)
        assert repeated.stride(0) == 0
        found = model.lowered(repeated)
        torch.testing.assert_close(found, model.lowered(repeated.contiguous()), rtol=0, atol=0)
        assert torch.equal(found[0], found[1])


ANY_BATCH = (
    "mobilenet_v2",
    "unet",
    "vit",
    "bert",
    "zoo audio_conv1d",
    "zoo video_conv3d",
    "zoo conv_transpose_decoder",
)


def dynamic_batch(name: str, target: str) -> qc.Lowered:
    case = CASES[name]
    args, _ = case.example()
    batch = torch.export.Dim("batch", min=1, max=64)
    captured = qc.capture(case.model(), args, dynamic_shapes=tuple({0: batch} for _ in args))
    prepared = qc.prepare(captured, target)
    qc.calibrate(prepared, [case.example(seed)[0] for seed in CALIBRATION], progress="silent")
    made: qc.Lowered = qc.lower(qc.convert(prepared, reduce_range="weights"), target)
    return made


@each(*ANY_BATCH, slow=False)
def test_batches_of_sizes_that_were_not_captured(name: str, target: str) -> None:
    lowered = dynamic_batch(name, target)
    for size in (1, 2, 5):
        check_kernels(lowered, *CASES[name].example(4, size)[0])


class Everywhere(nn.Module):
    """Convolutions that take images of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.same = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, padding=1)
        self.deep, self.up = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.ConvTranspose2d(8, 8, 2, 2)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x).relu()
        x = (self.same(x) + x).relu()
        x = nn.functional.hardswish(self.deep(x))
        x = nn.functional.max_pool2d(self.up(x).relu(), 2)
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize("target", TARGETS)
def test_images_of_sizes_that_were_not_captured(target: str) -> None:
    torch.manual_seed(0)
    example = torch.randn(2, 3, 16, 16)
    sides = dict.fromkeys((0, 2, 3), torch.export.Dim.AUTO)
    captured = qc.capture(Everywhere().eval(), (example,), dynamic_shapes=(sides,))
    prepared = qc.prepare(captured, target)
    qc.calibrate(prepared, [example], progress="silent")
    lowered = qc.lower(qc.convert(prepared, reduce_range="weights"), target)
    for shape in ((2, 3, 16, 16), (3, 3, 32, 24), (5, 3, 18, 66)):
        check_kernels(lowered, torch.randn(shape))
