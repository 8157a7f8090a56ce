"""What is known of a node beside its call, in every form, and parts of programs."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc.errors import UnknownNameError
from quantc.ir.program import DumpFormat, Program
from quantc.text.node_facts import Decision, Decisions, select


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU())
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.erf(self.head(self.stem(x).mean((2, 3))))


@pytest.fixture(scope="module")
def net() -> Program:
    torch.manual_seed(0)
    x = torch.randn(2, 2, 6, 6)
    prepared = qc.prepare(qc.capture(Net().eval(), (x,)), "qnnpack")
    qc.calibrate(prepared, [(x,)])
    return qc.convert(prepared)


def test_a_decision_has_rule_technique_spec_and_scale(net: Program) -> None:
    found = Decisions(net).of(net.node("relu"))
    assert found is not None
    assert (found.verdict, found.rule, found.quantizer, found.technique) == ("quantized", "conv", "qnnpack", "static")
    quantize = next(node for node in net.node("relu").users if "quantize" in node.name)
    scale, zero_point = quantize.args[1:3]
    assert list(found.scale) == [pytest.approx(scale)]
    assert list(found.zero_point) == [zero_point]
    assert "uint8" in found.spec


def test_what_is_float_has_the_reason() -> None:
    config = qc.QuantConfig().set_op("linear", qc.FLOAT)
    program = qc.capture(Net().eval(), (torch.randn(2, 2, 6, 6),))
    prepared = qc.prepare(program, "qnnpack", config=config)
    found = Decisions(prepared).of(prepared.node("linear"))
    assert found is not None
    assert found.verdict == "float"
    assert "as the config says" in found.reason


def test_before_annotation_nothing_is_decided() -> None:
    program = qc.capture(nn.Linear(2, 2).eval(), (torch.ones(1, 2),))
    assert all(Decisions(program).of(node) is None for node in program.nodes())


def test_json_has_decisions_and_one_scale_a_channel(net: Program) -> None:
    nodes = {node["name"]: node for graph in json.loads(net.dump("json"))["graphs"] for node in graph["nodes"]}
    assert nodes["relu"]["decision"]["rule"] == "conv"
    assert isinstance(nodes["relu"]["decision"]["scale"], float)


def test_several_scales_are_a_list_and_a_range_of_text() -> None:
    one, several = Decision(scale=(0.5,), zero_point=(3,)), Decision(scale=(0.5, 0.125), zero_point=(0, 0))
    assert (one.to_data()["scale"], one.to_data()["zero_point"], one.scale_text) == (0.5, 3, "0.5")
    assert (several.to_data()["scale"], several.scale_text) == ([0.5, 0.125], "0.125..0.5 (2)")
    assert Decision().to_data()["scale"] is None


def test_networkx_carries_arguments_module_and_verdict(net: Program) -> None:
    row = net.to_networkx().nodes["relu"]
    assert (row["module"], row["verdict"], row["rule"]) == ("stem.1", "quantized", "conv")
    assert net.to_networkx().nodes["conv2d"]["arguments"].endswith("b=%stem_0_bias")


def test_dot_clusters_modules_folds_constants_and_colours_verdicts(net: Program) -> None:
    text = net.dump("dot")
    assert 'label="stem"' in text
    assert 'label="stem.0"' in text
    assert "get_attr" not in text
    assert "fillcolor" in text
    assert text.count("{") == text.count("}")


@pytest.mark.parametrize("form", ["text", "table", "json", "dot", "graphml"])
def test_every_form_can_be_cut_to_a_module_or_a_range(net: Program, form: str) -> None:
    stem = net.dump(form, only="stem")  # type: ignore[arg-type]
    assert "relu" in stem
    assert "erf" not in stem
    some = net.dump(form, only="linear..erf")  # type: ignore[arg-type]
    assert "erf" in some
    assert "relu" not in some


def test_a_part_that_is_not_there(net: Program) -> None:
    with pytest.raises(UnknownNameError, match="'stam'"):
        select(net, "stam")
    with pytest.raises(UnknownNameError, match="nowhere"):
        select(net, "relu..nowhere")


@pytest.mark.parametrize("only", ["erf..linear", ""])
def test_parts_that_make_no_sense_are_refused(net: Program, only: str) -> None:
    with pytest.raises(UnknownNameError, match="unknown"):
        net.dump("text", only=only)


def test_dot_shows_constants_in_lists_and_in_results() -> None:
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.k, self.w = nn.Parameter(torch.ones(1, 2)), nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return torch.cat([x, self.k]), self.w

    text = qc.capture(Kept().eval(), (torch.ones(2, 2),)).dump("dot")
    assert "k = f32[1,2]" in text
    assert "w = f32[3]" in text


@pytest.mark.parametrize("form", ["text", "table", "json", "dot", "graphml"])
def test_what_is_no_name_is_refused_in_every_form(net: Program, form: DumpFormat) -> None:
    for only in (3, ["relu"], net.node("relu")):
        with pytest.raises(UnknownNameError, match="unknown module or range") as caught:
            net.dump(form, only=only)  # type: ignore[arg-type]
        assert "first..last" in str(caught.value.advice)


def test_a_constant_whose_readers_are_left_out_is_a_box(net: Program) -> None:
    name = next(node.name for node in net.nodes() if node.op == "get_attr")
    assert f'"{name}" [label=' in net.dump("dot", only=f"{name}..{name}")
    assert f'"{name}" [label=' not in net.dump("dot")
