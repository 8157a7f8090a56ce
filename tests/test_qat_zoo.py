"""Every model of the zoo and every architecture: trained a step, and converted to the bit."""

from __future__ import annotations

import pytest
import torch
from torch.utils import _pytree as pytree

import quantc as qc
from quantc.errors import AnnotationError, ModeError, TrainingError
from tests import architectures, zoo
from tests.test_qat import assert_converts_exactly
from tests.zoo.case import Case

CASES = {case.name: case for case in (*architectures.CASES, *zoo.CASES)}
STATEFUL = {"counter"}
"""Each call changes what the next one gives."""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["x86", "qnnpack", "executorch"])
@pytest.mark.parametrize("case", [case for name, case in CASES.items() if name not in STATEFUL], ids=str)
def test_a_step_of_training_converts_exactly(case: Case, backend: str) -> None:
    args, kwargs = case.example()
    try:
        program = qc.capture(case.model().train(), args, example_kwargs=kwargs or None)
        prepared = qc.prepare(program, backend, qat=True)
    except (AnnotationError, ModeError, TrainingError) as refusal:
        pytest.skip(refusal.what)
    prepared.verify()
    optimizer = torch.optim.SGD(prepared.parameters(), lr=1e-4)
    outputs = [leaf for leaf in pytree.tree_leaves(prepared(*args, **kwargs)) if _learns(leaf)]
    torch.stack([leaf.square().mean() for leaf in outputs]).sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    try:
        prepared.eval()
        converted = assert_converts_exactly(prepared, *args, **kwargs)
    except TrainingError as refusal:
        pytest.skip(refusal.what)  # a branch that the example does not enter
    converted.verify()


def _learns(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.requires_grad
