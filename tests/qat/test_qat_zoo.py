"""Every model of the zoo and every architecture: trained a step, and converted to the bit."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch.utils import _pytree as pytree

import quantc as qc
from quantc.errors import AnnotationError, ModeError, QuantcError, TrainingError
from tests import zoo
from tests.support import architectures
from tests.support.training import assert_converts_exactly
from tests.zoo.case import Case

CASES = {case.name: case for case in (*architectures.CASES, *zoo.CASES)}
STATEFUL = {"counter"}
"""Each call changes what the next one gives."""


@dataclass(frozen=True)
class Refused:
    """Models that a backend may refuse to train, and the error with which it has to."""

    error: type[QuantcError]
    words: str
    names: str

    def has(self, name: str) -> bool:
        return name in self.names.split()


UNQUANTIZED = (AnnotationError, "nothing was quantized")
UNTRAINED = (TrainingError, "has no parameter that takes a gradient")
EVERYWHERE = (
    Refused(*UNQUANTIZED, "cache inplace_maybe_copy inplace_saved_before inplace_view inplace_zeroed"),
    Refused(*UNQUANTIZED, "moving_average spell_pads spell_slices"),
    Refused(ModeError, "reads self.training", "static_branch"),
    Refused(TrainingError, "a no_grad region was inlined", "no_grad_part"),
    Refused(TrainingError, "no batch has gone through it in training mode", "cond"),
)
REFUSED: dict[str, tuple[Refused, ...]] = {
    "x86": (
        *EVERYWHERE,
        Refused(*UNQUANTIZED, "batch_norms functional_norms hand_written_norms layer_norms einsum_attention"),
        Refused(*UNQUANTIZED, "inplace_input_clone inplace_set_items inplace_writes_input nested_inputs pass_through"),
        Refused(*UNQUANTIZED, "pools spell_activations spell_arithmetic spell_creations spell_moves spell_reductions"),
        Refused(*UNQUANTIZED, "spell_relus spell_reshapes"),
    ),
    "qnnpack": (
        *EVERYWHERE,
        Refused(*UNTRAINED, "inplace_input_clone inplace_writes_input nested_inputs pools spell_arithmetic"),
        Refused(*UNTRAINED, "spell_creations spell_moves spell_reductions spell_relus spell_reshapes"),
    ),
    "executorch": (
        *EVERYWHERE,
        Refused(*UNQUANTIZED, "batch_norms inplace_set_items inplace_writes_input spell_reductions"),
        Refused(*UNQUANTIZED, "elman gru_cell_loop gru_given_state projected_lstm einsum_attention layer_norms"),
        Refused(*UNQUANTIZED, "inplace_input_clone spell_creations spell_relus spell_reshapes"),
        Refused(*UNTRAINED, "nested_inputs pools spell_arithmetic spell_moves"),
    ),
}
"""By backend. A name may be taken out of here, and none may be added: a model that is in it and trains after all fails."""
MAX_REFUSED = 79


def test_no_more_models_are_refused_than_were() -> None:
    pairs = [(backend, name) for backend, rows in REFUSED.items() for row in rows for name in row.names.split()]
    assert len(pairs) == len(set(pairs)) <= MAX_REFUSED
    assert {name for _, name in pairs} <= set(CASES) - STATEFUL


@pytest.mark.slow
@pytest.mark.parametrize("backend", REFUSED)
@pytest.mark.parametrize("case", [case for name, case in CASES.items() if name not in STATEFUL], ids=str)
def test_a_step_of_training_converts_exactly(case: Case, backend: str) -> None:
    refused = [row for row in REFUSED[backend] if row.has(case.name)]
    if not refused:
        train_a_step(case, backend)
        return
    with pytest.raises(refused[0].error, match=refused[0].words):
        train_a_step(case, backend)


def train_a_step(case: Case, backend: str) -> None:
    """Train a model for a step and convert it; what comes out is to the bit what the trained model gives."""
    args, kwargs = case.example()
    prepared = qc.prepare(qc.capture(case.model().train(), args, example_kwargs=kwargs or None), backend, qat=True)
    prepared.verify()
    optimizer = torch.optim.SGD(prepared.parameters(), lr=1e-4)
    outputs = [leaf for leaf in pytree.tree_leaves(prepared(*args, **kwargs)) if _learns(leaf)]
    torch.stack([leaf.square().mean() for leaf in outputs]).sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    prepared.eval()
    assert_converts_exactly(prepared, *args, **kwargs).verify()


def _learns(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.requires_grad
