"""The PT2 export flow: what prepare and convert give, what they keep, and what they refuse."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from quantc.errors import AnnotationError, CalibrationError, ModeError, QuantcError
from quantc.flows.observers import MinMaxObserver
from quantc.flows.pt2e import (
    QuantizationAnnotation,
    QuantizationSpec,
    Quantizer,
    SharedQuantizationSpec,
    XNNPACKQuantizer,
    convert_pt2e,
    get_symmetric_quantization_config,
    prepare_pt2e,
)
from quantc.flows.pt2e.annotations import Annotations, Observed, Same, read_annotations
from quantc.flows.pt2e.quantizer import EdgeOrNode
from tests.support.custom_quantizer import ACT, CustomQuantizer, Network
from tests.support.oracle_models import Residual, Subject
from tests.support.oracles import decomposed, sqnr

aten = torch.ops.aten
RESIDUAL = Subject("residual", Residual, (2, 3, 16, 16))


def own(**choices: Any) -> XNNPACKQuantizer:
    return XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True, **choices))


def captured(model: nn.Module, *inputs: Tensor, strict: bool = False) -> Any:
    return torch.export.export(model, inputs, strict=strict).module()


def calibrated(model: nn.Module, quantizer: Any, *batches: Tensor) -> fx.GraphModule:
    prepared = prepare_pt2e(captured(model, batches[0]), quantizer)
    with torch.no_grad():
        for batch in batches:
            prepared(batch)
    return prepared


@pytest.fixture(scope="module")
def converted() -> fx.GraphModule:
    batches = RESIDUAL.batches(2, seed=1)
    exported = captured(RESIDUAL.with_norms(), *batches[0], strict=True)
    exported.meta["mine"] = 7
    prepared = prepare_pt2e(exported, own())
    with torch.no_grad():
        prepared(*batches[0])
    assert prepared.meta["mine"] == 7
    return convert_pt2e(prepared)


def nodes(module: fx.GraphModule, verb: str) -> list[fx.Node]:
    return [node for node in module.graph.nodes if decomposed(node, verb)]


# -- what others rely on ---------------------------------------------------------------------------------------


def test_observers_are_called_by_their_number() -> None:
    prepared = prepare_pt2e(captured(RESIDUAL.with_norms(), *RESIDUAL.batches(1, seed=1)[0]), own())
    calls = [node for node in prepared.graph.nodes if node.op == "call_module" and node.target != "_guards_fn"]
    assert sorted(str(node.target) for node in calls) == sorted(
        f"activation_post_process_{number}" for number in range(len(calls))
    )


def test_scales_are_literals_and_by_channel_attributes(converted: fx.GraphModule) -> None:
    for node in nodes(converted, "quantize") + nodes(converted, "dequantize"):
        if "per_tensor.default" in str(node.target):
            assert isinstance(node.args[1], float)
            assert isinstance(node.args[2], int)
        else:
            assert "per_channel.default" in str(node.target)
            assert [operand.op for operand in node.all_input_nodes[1:]] == ["get_attr", "get_attr"]


def test_every_dequantize_has_one_reader_and_its_metadata(converted: fx.GraphModule) -> None:
    found = nodes(converted, "dequantize")
    assert len(found) > 15
    for node in found:
        (reader,) = node.users
        for key in ("nn_module_stack", "stack_trace"):
            assert node.meta.get(key) == reader.meta.get(key), node.name


def test_weights_are_stored_frozen(converted: fx.GraphModule) -> None:
    stored = [node for node in converted.graph.nodes if str(node.target).startswith("_frozen_param")]
    assert [str(node.target) for node in stored] == [f"_frozen_param{number}" for number in range(6)]
    assert {getattr(converted, str(node.target)).dtype for node in stored} == {torch.int8}
    assert not [name for name, tensor in converted.named_parameters() if tensor.dim() > 1]


def test_metadata_survives(converted: fx.GraphModule) -> None:
    assert converted.meta["mine"] == 7
    convs = [node for node in converted.graph.nodes if node.target is aten.conv2d.default]
    for node in convs:
        assert {"nn_module_stack", "source_fn_stack", "from_node", "stack_trace"} <= set(node.meta)
    for node in nodes(converted, "quantize"):
        assert node.meta["from_node"]


def test_run_time_scales() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    converted = convert_pt2e(prepare_pt2e(captured(model, torch.randn(2, 8)), own(is_dynamic=True)))
    targets = [str(node.target) for node in converted.graph.nodes]
    assert targets.count("quantized_decomposed.choose_qparams.tensor") == 2
    assert targets.count("quantized_decomposed.quantize_per_tensor.tensor") == 2
    assert targets.count("quantized_decomposed.dequantize_per_tensor.tensor") == 2
    x = torch.randn(5, 8)
    with torch.no_grad():
        assert sqnr(model(x[:2]), converted(x[:2])) > 30


@pytest.mark.parametrize("flag", ["use_reference_representation", "fold_quantize"])
def test_flags_that_are_no_bools_are_refused(flag: str) -> None:
    with pytest.raises(ValueError, match=flag):
        convert_pt2e(calibrated(nn.Linear(2, 2), own(), torch.randn(1, 2)), **{flag: "yes"})  # type: ignore[arg-type]


def test_weights_stay_float_without_folding() -> None:
    prepared = calibrated(nn.Linear(4, 4), own(), torch.randn(3, 4))
    folded, unfolded = convert_pt2e(prepared), convert_pt2e(prepared, fold_quantize=False)
    x = torch.randn(3, 4)
    with torch.no_grad():
        assert torch.equal(folded(x), unfolded(x))
    assert len(nodes(unfolded, "quantize")) == len(nodes(folded, "quantize")) + 1


def test_the_callers_models_are_not_changed() -> None:
    model, (batch,) = RESIDUAL.with_norms(), RESIDUAL.batches(1, seed=1)
    exported = captured(model, *batch)
    code, state = exported.code, copy.deepcopy(exported.state_dict())
    prepared = prepare_pt2e(exported, own())
    assert exported.code == code
    assert not any("quantization_annotation" in node.meta for node in exported.graph.nodes)
    with torch.no_grad():
        prepared(*batch)
    code = prepared.code
    first = convert_pt2e(prepared)
    assert prepared.code == code
    with torch.no_grad():
        prepared(*[3 * part for part in batch])  # and calibrated further
        assert not torch.equal(convert_pt2e(prepared)(*batch), first(*batch))
    assert all(torch.equal(value, state[name]) for name, value in exported.state_dict().items())


# -- what is refused -------------------------------------------------------------------------------------------


def test_no_data_is_an_error() -> None:
    prepared = prepare_pt2e(captured(nn.Linear(2, 2), torch.randn(1, 2)), own())
    with pytest.raises(CalibrationError, match="seen no data") as caught:
        convert_pt2e(prepared)
    assert "linear" in str(caught.value)


def test_what_was_not_prepared_is_an_error() -> None:
    exported = captured(nn.Linear(2, 2), torch.randn(1, 2))
    with pytest.raises(CalibrationError, match="no observers"):
        convert_pt2e(exported)
    with pytest.raises(ValueError, match=r"torch\.export"):
        prepare_pt2e(nn.Linear(2, 2), own())  # type: ignore[arg-type]
    with pytest.raises(AnnotationError, match=r"lacks .*annotate"):
        prepare_pt2e(exported, "xnnpack")


def test_nothing_quantized_is_an_error() -> None:
    exported = captured(nn.Sequential(nn.Tanh()), torch.randn(1, 2))
    with pytest.raises(AnnotationError, match="annotated nothing"):
        prepare_pt2e(exported, own())
    assert prepare_pt2e(exported, own(), allow_empty=True)(torch.zeros(1, 2)).shape == (1, 2)


def test_modes_are_not_switched_behind_the_users_back() -> None:
    prepared = calibrated(nn.Linear(2, 2), own(), torch.randn(1, 2))
    for switch in (prepared.train, prepared.eval):
        with pytest.raises(NotImplementedError, match="move_exported_model_to_train"):
            switch()


def test_a_norm_that_is_trained_is_an_error() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
    with pytest.raises(ModeError, match="training mode"):
        prepare_pt2e(captured(model.train(), torch.randn(2, 3, 4, 4)), own())


# -- norms -------------------------------------------------------------------------------------------------------


class TwoNorms(nn.Module):
    """One convolution read through two norms, and one that is read beside its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.other = nn.Conv2d(3, 3, 1, bias=False)
        self.a, self.b, self.c = (nn.BatchNorm2d(3) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        y = self.other(x)
        return self.a(self.conv(x)) + self.b(self.conv(2 * x)), self.c(y) * y


def test_norms_are_folded_where_that_is_right() -> None:
    """torchao folds all three: the second into nothing, the third for readers that do not want it."""
    torch.manual_seed(0)
    model = TwoNorms()
    for norm in (model.a, model.b, model.c):
        nn.init.uniform_(norm.weight, 0.5, 2)
        nn.init.uniform_(norm.running_mean, -1, 1)  # type: ignore[arg-type]
    x = torch.randn(2, 3, 4, 4)
    prepared = prepare_pt2e(captured(model.eval(), x), own())
    with torch.no_grad():
        for found, expected in zip(prepared(x), model(x), strict=True):
            assert torch.allclose(found, expected, atol=1e-5)
    assert sum(node.target is aten.batch_norm.default for node in prepared.graph.nodes) == 1


# -- sharing -----------------------------------------------------------------------------------------------------


class Ladder(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for _ in range(4):
            x, y = y, x + y
        return y


LADDER = torch.export.export(Ladder(), (torch.rand(2), torch.rand(2))).module().graph
ADDS = [node for node in LADDER.nodes if node.target is aten.add.Tensor]
PLACES: list[EdgeOrNode] = [
    place for node in ADDS for place in (*((each, node) for each in node.all_input_nodes), node)
]


@st.composite
def wanted(draw: st.DrawFn) -> dict[EdgeOrNode, Any]:
    """Some places with a spec of their own, others like one of these: never a circle."""
    chosen = draw(st.permutations(PLACES))[: draw(st.integers(1, len(PLACES)))]
    made: dict[EdgeOrNode, Any] = {}
    for place in chosen:
        is_like = bool(made) and draw(st.booleans())
        made[place] = Same(draw(st.sampled_from(list(made)))) if is_like else Observed(ACT)
    return made


@settings(max_examples=100)
@given(wanted(), st.randoms(use_true_random=False), st.sets(st.sampled_from(ADDS)))
def test_groups_do_not_depend_on_the_order_of_annotation(
    made: dict[Any, Any], random: Any, apart: set[fx.Node]
) -> None:
    shuffled = list(made.items())
    random.shuffle(shuffled)
    sets = [
        {frozenset(group.places) for group in Annotations(dict(each), apart).groups()}
        for each in (made.items(), shuffled)
    ]
    assert sets[0] == sets[1]
    assert sum(len(each) for each in sets[0]) == len(made)


@settings(max_examples=100)
@given(wanted(), st.sets(st.sampled_from(ADDS)))
def test_groups_are_what_is_tied(made: dict[Any, Any], apart: set[fx.Node]) -> None:
    """Against pairs looked at one by one, merged until nothing changes."""

    def tensor(place: EdgeOrNode) -> fx.Node:
        return place[0] if isinstance(place, tuple) else place

    def is_willing(place: Any) -> bool:
        return isinstance(place, tuple) and place[1] not in apart

    sets = [{place} for place in made]
    for place, found in made.items():
        if isinstance(found, Same):
            sets.append({place, found.place})
        same = [other for other in made if tensor(other) is tensor(place) and (is_willing(other) or is_willing(place))]
        sets += [{place, other} for other in same]
    merged: list[set[Any]] = []
    for each in sets:
        hit = [other for other in merged if other & each]
        merged = [other for other in merged if not other & each] + [each.union(*hit)]
    assert {frozenset(group.places) for group in Annotations(made, apart).groups()} == set(map(frozenset, merged))


class Faulty(Quantizer):
    def __init__(self, fault: str) -> None:
        self.fault = fault

    def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
        (node,) = model.graph.find_nodes(op="call_function", target=aten.add.Tensor)
        x, y = node.all_input_nodes
        faults: dict[str, QuantizationAnnotation] = {
            "circle": QuantizationAnnotation(
                {x: SharedQuantizationSpec((y, node)), y: SharedQuantizationSpec((x, node))}
            ),
            "not annotated": QuantizationAnnotation({x: SharedQuantizationSpec(y)}),
            "does not": QuantizationAnnotation({node: ACT}),
            "no spec": QuantizationAnnotation({x: "int8"}),  # type: ignore[dict-item]
        }
        node.meta["quantization_annotation"] = faults[self.fault]
        return model

    def validate(self, model: fx.GraphModule) -> None:
        """It knows no better."""


class Sum(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


@pytest.mark.parametrize("fault", ["circle", "not annotated", "does not", "no spec"])
def test_faulty_annotations_are_named(fault: str) -> None:
    with pytest.raises(AnnotationError, match=fault) as caught:
        prepare_pt2e(captured(Sum(), torch.rand(2), torch.rand(2)), Faulty(fault))
    assert caught.value.where
    assert caught.value.advice


# -- quantizers of one's own -------------------------------------------------------------------------------------


def test_a_quantizer_in_the_shape_of_the_tutorials() -> None:
    torch.manual_seed(0)
    model, x = Network().eval(), torch.randn(2, 3, 8, 8)
    prepared = calibrated(model, CustomQuantizer(), x)
    converted = convert_pt2e(prepared)
    with torch.no_grad():
        assert sqnr(model(x), converted(x)) > 30
    by_op = {node.name: node for node in converted.graph.nodes}
    pool, sigmoid, conv = by_op["max_pool2d"], by_op["sigmoid"], by_op["conv2d"]
    read, (written,) = pool.args[0], pool.users
    assert read.args[1:3] == written.args[1:3]
    (fixed,) = sigmoid.users
    assert fixed.args[1:6] == (1 / 256, 0, 0, 255, torch.uint8)
    x_read, w_read, b_read = (operand.args for operand in conv.all_input_nodes)
    scales = [getattr(converted, str(args[1].target)) for args in (w_read, b_read)]
    assert b_read[-1] is torch.int32
    assert torch.allclose(scales[1], x_read[1] * scales[0])


def test_specs_are_known_by_their_fields() -> None:
    """And so those of other packages are read too."""
    torch.manual_seed(0)
    model, x = Network().eval(), torch.randn(2, 3, 8, 8)
    exported = captured(model, x)
    quantizer = CustomQuantizer()
    quantizer.annotate(exported)
    found = read_annotations(exported.graph)
    kinds = [type(wanted).__name__ for wanted in found.wanted.values()]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {"Observed": 14, "Derived": 3, "Same": 1, "Fixed": 1}


def test_validate_is_asked() -> None:
    grouped = nn.Sequential(nn.Conv2d(4, 4, 3, groups=2))
    with pytest.raises(QuantcError, match="has groups"):
        prepare_pt2e(captured(grouped, torch.randn(1, 4, 8, 8)), CustomQuantizer())


class Callback(CustomQuantizer):
    """Looks at every observer before it is placed, and rewrites the graph before it is annotated."""

    def __init__(self) -> None:
        self.seen: dict[EdgeOrNode, nn.Module] = {}
        self.transformed = False

    def transform_for_annotation(self, model: fx.GraphModule) -> fx.GraphModule:
        self.transformed = True
        return model

    def prepare_obs_or_fq_callback(
        self, model: fx.GraphModule, edge_or_node_to_obs_or_fq: dict[EdgeOrNode, nn.Module]
    ) -> None:
        self.seen = dict(edge_or_node_to_obs_or_fq)


def test_the_hooks_of_a_quantizer_are_called() -> None:
    quantizer = Callback()
    prepared = prepare_pt2e(captured(Network().eval(), torch.randn(2, 3, 8, 8)), quantizer)
    assert quantizer.transformed
    placed = {id(part) for name, part in prepared.named_children() if name.startswith("activation_post_process_")}
    assert placed <= {id(part) for part in quantizer.seen.values()}
    assert len(quantizer.seen) == 19


class Doubling(MinMaxObserver):
    """An observer that writes what it becomes itself."""

    def convert(self, model: fx.GraphModule, observer_node: fx.Node) -> None:
        with model.graph.inserting_before(observer_node):
            made = model.graph.call_function(aten.mul.Tensor, (observer_node.args[0], 2.0))
        observer_node.replace_all_uses_with(made)
        model.graph.erase_node(observer_node)


class ByItself(Quantizer):
    def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
        for node in model.graph.find_nodes(op="call_function", target=aten.add.Tensor):
            spec = QuantizationSpec(torch.int8, Doubling, -128, 127, torch.per_tensor_affine)
            node.meta["quantization_annotation"] = QuantizationAnnotation({}, spec)
        return model

    def validate(self, model: fx.GraphModule) -> None:
        """It has nothing to say."""


def test_observers_with_a_convert_of_their_own() -> None:
    x, y = torch.rand(3), torch.rand(3)
    prepared = prepare_pt2e(captured(Sum(), x, y), ByItself())
    prepared(x, y)
    assert torch.equal(convert_pt2e(prepared)(x, y), 2 * (x + y))


class Linears(Quantizer):
    """What a linear layer reads, whatever makes it: in a loop the weight is an input."""

    def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
        for node in model.graph.find_nodes(op="call_function", target=aten.linear.default):
            x, weight = node.all_input_nodes[:2]
            node.meta["quantization_annotation"] = QuantizationAnnotation({x: ACT, weight: ACT})
        return model

    def validate(self, model: fx.GraphModule) -> None:
        """Anything goes."""


class Looping(nn.Module):
    """A linear layer in the body of a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        def go_on(step: Tensor, _: Tensor) -> Tensor:
            return step < 3

        def body(step: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            return step + 1, torch.tanh(self.fc(state))

        return torch.while_loop(go_on, body, (torch.tensor(0), x))[1]  # type: ignore[no-untyped-call]


def test_bodies_of_loops_are_quantized() -> None:
    torch.manual_seed(0)
    model, x = Looping().eval(), torch.randn(2, 4)
    with torch.no_grad():
        prepared = prepare_pt2e(captured(model, x), Linears(), allow_empty=True)
        assert torch.allclose(prepared(x), model(x))
        converted = convert_pt2e(prepared)
        assert sqnr(model(x), converted(x)) > 25
    bodies = [part for part in converted.modules() if isinstance(part, fx.GraphModule) and part is not converted]
    assert any(nodes(body, "dequantize") for body in bodies)


def test_sizes_that_vary() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval(), torch.randn(3, 4)
    batch = torch.export.Dim("batch", min=2, max=64)
    exported: Any = torch.export.export(model, (x,), dynamic_shapes=({0: batch},)).module()
    prepared = prepare_pt2e(exported, own())
    with torch.no_grad():
        prepared(x)
        prepared(torch.randn(8, 4))
        converted = convert_pt2e(prepared)
        again = convert_pt2e(prepared, use_reference_representation=True)
        assert converted(torch.randn(5, 4)).shape == again(torch.randn(5, 4)).shape == (5, 2)
