"""The kit on passes: a good one passes, and each faulty one fails in its row."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quantc.ir.dialect import is_op
from quantc.ir.program import Program
from quantc.passes.annotate import Annotate
from quantc.passes.fuse import Fuse
from quantc.pipeline.pipeline import Pass
from quantc.pipeline.registry import PASSES
from quantc.testing import check_backend
from tests.support import faulty_plugins as plugins


@pytest.mark.parametrize("given", [plugins.MergeRelus, plugins.MergeRelus(keep=("relu_9",)), Fuse])
def test_a_good_pass_passes(given: Pass | type[Pass]) -> None:
    found = check_backend(given)
    assert found.failures == ()
    assert (found.noun, found.backend) == ("pass", given.name)
    expected = {"runs", "taken", "pipeline-text", "verifies", "truthful", "promise", "idempotent", "text"}
    assert {str(row.check) for row in found.rows} == expected
    assert "merge-relus" not in PASSES


@pytest.mark.parametrize(
    ("given", "check", "told"),
    [
        (plugins.DropRelus, "promise", "pass drop-relus changed the numbers"),
        (plugins.SilentRelus, "truthful", "reported no change, but the program has changed"),
        (plugins.OneRelu, "idempotent", "running it again changes the program once more"),
        (plugins.BackwardRelus, "verifies", "pass backward-relus failed"),
        (plugins.LostOption(keep=("relu",)), "pipeline-text", "reads as 'lost-option', another pass"),
        (plugins.Raising, "runs", "IndexError"),
        (plugins.Nothing, "taken", "changes none of the example programs"),
        (Annotate, "runs", "it cannot be made"),
    ],
)
def test_a_faulty_pass_fails_in_its_row(given: Pass | type[Pass], check: str, told: str) -> None:
    found = check_backend(given)
    (row,) = [row for row in found.failures if row.check != "taken" or check == "taken"]
    assert row.check == check
    assert told in row.what
    assert row.advice


def test_a_model_can_be_given_for_a_pass_that_needs_one() -> None:
    def tripled() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        return nn.Sequential(nn.ReLU(), nn.Sigmoid(), nn.Sigmoid()), (torch.randn(2, 4),)

    class MergeSigmoids(plugins.MergeRelus):
        """Wrong, and only seen where one sigmoid follows another."""

        name = "merge-sigmoids"

        def run(self, program: Program) -> bool:
            for node in program.graph.nodes:
                if is_op(node, "sigmoid") and is_op(node.args[0], "sigmoid"):
                    program.forward(node, node.args[0])
                    return True
            return False

    without = check_backend(MergeSigmoids)
    assert [row.check for row in without.failures] == ["taken"]
    found = check_backend(MergeSigmoids, examples={"mine": tripled})
    assert [row.check for row in found.failures] == ["promise"]
