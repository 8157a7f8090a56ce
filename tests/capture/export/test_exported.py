"""Programs from torch.export: origins, modes that are guessed, names of sizes, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.export import Dim

from quantc.capture.export.exported import NO_MODULE, clean_path, export, from_exported, origin_from_meta
from quantc.capture.refused_trace import RefusedError
from quantc.ir.sites import Origin
from tests.support.edge_models import module


@pytest.mark.parametrize(
    ("path", "clean"),
    [
        ("layer1.0.conv", "layer1.0.conv"),
        ("layer1.0@1", "layer1.0"),
        ("L['self'].layer1[0]", "layer1.0"),
        ("L['self'].blocks['a'].fc", "blocks.a.fc"),
        ("L['self']", ""),
        ("_export_root.layer1.0", "layer1.0"),
        ("_export_root", ""),
        ("", ""),
    ],
)
def test_paths_of_every_kind_of_export_are_those_of_the_model(path: str, clean: str) -> None:
    assert clean_path(path) == clean


def node_with(**meta: Any) -> fx.Node:
    graph = fx.Graph()
    node = graph.call_function(torch.ops.aten.relu.default, (graph.placeholder("x"),))
    node.meta.update(meta)
    return node


def test_an_origin_is_the_innermost_module_and_the_user_s_line() -> None:
    stack = {"a": ("", "model.Net"), "b": ("block.0@1", nn.Linear)}
    node = node_with(nn_module_stack=stack, stack_trace='File "/x/model.py", line 7, in forward')
    assert origin_from_meta(node) == Origin("block.0", "torch.nn.modules.linear.Linear", "/x/model.py", 7)
    assert origin_from_meta(node_with(nn_module_stack={"a": (NO_MODULE, "x")})) == Origin()
    assert origin_from_meta(node_with()) == Origin()
    assert origin_from_meta(node.all_input_nodes[0]) is None


def exported(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return export(model, args, kwargs, dynamic_shapes=None, strictness="non-strict")


def test_a_tensor_given_twice_is_two_inputs() -> None:
    x = torch.ones(2, 4)
    program = exported(module(lambda self, x, y: x - y)(), x, x)
    assert torch.equal(program(x, x * 3), x * -2)


def test_sizes_have_the_names_and_ranges_of_the_user() -> None:
    model = module(lambda self, x: torch.relu(x))()
    shapes = {"x": {0: Dim("rows", min=2, max=9)}}
    program = export(model, (torch.ones(3, 4),), {}, dynamic_shapes=shapes, strictness="non-strict")
    kind = program.signature.inputs[0].type
    assert kind is not None
    assert kind.shape == ("rows", 4)
    assert dict(program.signature.ranges) == {"rows": (2, 9)}


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_of_an_exported_program_is_guessed_from_its_flags(training: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train(training)
    found = torch.export.export(model, (torch.ones(2, 4),))
    program = from_exported(found, name="Mine")
    assert (program.training, program.name, program.method) == (training, "Mine", "export")
    assert sorted(program.state_dict()) == ["0.bias", "0.weight"]


def test_numbers_and_none_stay_constants_of_the_signature() -> None:
    def forward(self: nn.Module, x: Tensor, times: int, mask: Tensor | None = None) -> Tensor:
        return x * times if mask is None else x * mask

    program = exported(module(forward)(), torch.ones(2), 3, mask=None)
    assert [(row.is_constant, row.constant) for row in program.signature.inputs] == [
        (False, None), (True, 3), (True, None),
    ]  # fmt: skip


def test_transforms_of_torch_func_are_refused() -> None:
    model = module(lambda self, x: torch.vmap(lambda row: row * row.sum())(x))()
    with pytest.raises(RefusedError, match=r"torch\.func"):
        exported(model, torch.ones(2, 4))


def test_ops_of_a_branch_belong_to_the_module_whose_weights_they_read() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            return torch.cond(x.sum() > 0, lambda x: self.up(x).relu(), lambda x: self.down(x).neg(), (x,))

    program = exported(Branch(), torch.ones(2, 4))
    paths = {
        str(node.target).split(".")[1]: program.origins[node].module_path
        for path, graph in program.graphs()
        if path
        for node in graph.nodes
        if node.op == "call_function"
    }
    assert paths["linear"] in ("up", "down")
    assert paths["relu"] == paths["neg"] == ""  # of the model itself, which calls the branch
