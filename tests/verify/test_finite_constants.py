"""Constants that are no numbers, refused by name; masks may be infinite."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, fx, nn

from quantc.errors import DataError, TrainingError
from quantc.ir.program import TRAINED, Program
from quantc.ir.sites import Origin
from quantc.verify.finite_constants import refuse_unsound, refuse_unsound_module
from tests.support.programs import Builder, Choice, aten, exported

INF, NAN = math.inf, math.nan


def masked(mask: Tensor, weight: Tensor | None = None) -> Program:
    """softmax(x @ w + mask)."""
    build = Builder()
    x = build.input("x", 2, 3)
    w = build.constant("w", nn.Parameter(torch.ones(3, 3) if weight is None else weight))
    linear = build.call(aten.linear.default, x, w)
    added = build.call(aten.add.Tensor, linear, build.constant("mask", mask))
    program = build.program(build.call(aten.softmax.int, added, -1))
    program.origins[linear] = Origin("head", "Linear")
    return program


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_weight_that_is_no_number_is_refused_with_its_reader(bad: float) -> None:
    weight = torch.ones(3, 3)
    weight[1, 2] = weight[0, 0] = bad
    with pytest.raises(DataError, match="2 of 9 values of w ") as caught:
        refuse_unsound(masked(torch.zeros(3), weight))
    assert caught.value.where == "linear (head : Linear)"


def test_a_mask_may_be_infinite_and_never_nan() -> None:
    refuse_unsound(masked(torch.tensor([0.0, -INF, 0.0])))
    with pytest.raises(DataError, match="mask"):
        refuse_unsound(masked(torch.tensor([0.0, NAN, 0.0])))
    parameter = masked(torch.zeros(3))
    del parameter.root.mask
    parameter.root.register_parameter("mask", nn.Parameter(torch.tensor([0.0, -INF, 0.0])))
    with pytest.raises(DataError, match="mask"):
        refuse_unsound(parameter)


def test_a_program_that_trains_has_diverged() -> None:
    program = masked(torch.zeros(3), torch.full((3, 3), NAN))
    program.root.add_module(TRAINED, nn.Module())
    with pytest.raises(TrainingError, match="9 of 9 values of w "):
        refuse_unsound(program)


def test_what_nobody_reads_or_is_multiplied_by_zero_is_no_fault() -> None:
    build = Builder()
    bias = build.constant("bias", torch.full((2, 2), NAN))
    x = build.input("x", 2, 2)
    unread = build.constant("unread", torch.full((2,), NAN))
    program = build.program(build.call(aten.addmm.default, bias, x, x, beta=0))
    refuse_unsound(program)
    assert not unread.users
    program.node("addmm").kwargs = {"beta": 2}
    with pytest.raises(DataError, match="bias"):
        refuse_unsound(program)


def test_constants_of_nested_graphs_are_named_by_their_path() -> None:
    program = exported(Choice(), [torch.ones(2, 4)])
    inner = next(graph for path, graph in program.graphs() if path == "false_graph_0")
    sub = next(node for node in inner.nodes if node.op == "call_function")
    sub.args = (sub.args[0], program.constant("hidden", torch.tensor([NAN]), before=sub))
    with pytest.raises(DataError, match="of false_graph_0/hidden "):
        refuse_unsound(program)


def test_tensors_of_opaque_modules_are_looked_at() -> None:
    program = masked(torch.zeros(3))
    program.root.layer = nn.Linear(3, 3)
    softmax = program.node("softmax")
    program.replace(softmax, program.emit("layer", (softmax.args[0],), before=softmax, like=softmax))
    refuse_unsound(program)
    nn.init.constant_(program.root.layer.bias, INF)
    with pytest.raises(DataError, match=r"3 of 3 values of layer\.bias "):
        refuse_unsound(program)


# -- modules -----------------------------------------------------------------------------------------------------------


class Own(nn.Module):
    """A mask of its own, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([0.0, -INF]))
        self.norm = nn.BatchNorm1d(2)


class Observer(nn.Module):
    """Ranges are infinite until they are found."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("min_val", torch.tensor(INF))

    def calculate_qparams(self) -> None:
        """What makes it an observer."""


def test_a_models_own_buffers_may_be_masks_and_those_of_torchs_layers_may_not() -> None:
    model = Own()
    refuse_unsound_module(model)
    nn.init.constant_(model.norm.get_buffer("running_var"), INF)
    with pytest.raises(DataError, match=r"2 of 2 values of norm\.running_var "):
        refuse_unsound_module(model)


def test_tensors_of_observers_are_left_to_them() -> None:
    model = Own()
    model.observer = Observer()
    model.observer_of_another = nn.Linear(2, 2)
    refuse_unsound_module(model)
    nn.init.constant_(model.observer_of_another.bias, NAN)
    with pytest.raises(DataError, match=r"observer_of_another\.bias"):
        refuse_unsound_module(model)


def test_a_buffer_that_a_layer_of_a_graph_reads_is_no_mask() -> None:
    root, graph = nn.Module(), fx.Graph()
    root.register_buffer("table", torch.tensor([[0.0, -INF]]))
    x, table = graph.placeholder("x"), graph.create_node("get_attr", "table")
    graph.output(graph.call_function(aten.add.Tensor, (x, table)))
    module = fx.GraphModule(root, graph)
    refuse_unsound_module(module)
    add = module.graph.find_nodes(op="call_function", target=aten.add.Tensor)[0]
    add.target = aten.linear.default
    with pytest.raises(DataError, match="table"):
        refuse_unsound_module(module)
