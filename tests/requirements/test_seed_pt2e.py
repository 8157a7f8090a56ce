"""The document on quantization with PT2 export, item by item, and its code."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import fx, nn

import quantc as qc
import quantc.flows.pt2e
import quantc.flows.pt2e.qnnpack_quantizer as qq
from quantc.errors import AnnotationError, CalibrationError
from quantc.flows.fake_quantize import FakeQuantizeBase
from quantc.flows.observers import HistogramObserver, MinMaxObserver, ObserverBase
from quantc.flows.pt2e import convert_pt2e, convert_to_pt2e, prepare_pt2e, prepare_qat_pt2e, to_program
from quantc.flows.pt2e.quantizer import OperatorConfig, QuantizationAnnotation, QuantizationSpec, Quantizer
from tests.support.oracles import decomposed, sqnr
from tests.support.seed_documents import run

aten = torch.ops.aten

# -- the code --------------------------------------------------------------------------------------------------------

UX = """
import torch
from torch.ao.quantization._quantize_pt2e import convert_pt2e, prepare_pt2e
import torch.ao.quantization._pt2e.quantizer.qnnpack_quantizer as qq

class M(torch.nn.Module):
   def __init__(self):
      super().__init__()
      self.linear = torch.nn.Linear(5, 10)

   def forward(self, x):
      return self.linear(x)


example_inputs = (torch.randn(1, 5),)
model = M().eval()

# Step 1: Trace the model into an FX graph of flattened ATen operators
exported_graph_module = torch.export(model, example_inputs, ...)

# Step 2: Insert observers or fake quantize modules
quantizer = qq.QNNPackQuantizer()
operator_config = qq.get_symmetric_quantization_config(is_per_channel=True)
quantizer.set_global(operator_config)
prepared_graph_module = prepare_pt2e(exported_graph_module, quantizer)

# Step 4: Quantize the model
convered_graph_module = convert_pt2e(prepared_graph_module)

# Proceed with rest of PT2 stack
torch.compile(converted_graph_module, ...)
"""
CUSTOM = '''
from torch.ao.quantization._pte2.quantizer.Quantizer

class CustomQuantizer(Quantizer):
    def annotate(self, model: torch.fx.GraphModule) -> torch.fx.GraphModule:
        """
        Annotate nodes in the graph with observer or fake quant constructs to
        convey the desired way of quantization.
        """
        ...

    def validate(self, model: torch.fx.GraphModule) -> None:
        """
        Validate the annotated graph is supported by the backend
        """
        ...

    # annotate nodes in the graph with observer or fake quant constructors
    # to convey the desired way of quantization
    def get_supported_operators(cls) -> List[OperatorConfig]:
        """
        Return a list of ATen operators, `torch.nn.Module` types, or
        `torch.nn.functional` operators.
        """
        ...

quantizer = CustomQuantizer()
m = prepare_pt2e(m, quantizer)
'''
IMPORTS = {
    "from torch.ao.quantization._quantize_pt2e import": "from quantc.flows.pt2e import",
    "import torch.ao.quantization._pt2e.quantizer.qnnpack_quantizer as qq": (
        "import quantc.flows.pt2e.qnnpack_quantizer as qq"
    ),
}
READINGS = {
    "torch.export(model, example_inputs, ...)": "torch.export.export(model, example_inputs).module()",  # a module now
    "# Step 4: Quantize": "prepared_graph_module(*example_inputs)  # step 3 is missing: calibration\n# Step 4: Quantize",
    "convered_graph_module": "converted_graph_module",
    "torch.compile(converted_graph_module, ...)": 'compiled = torch.compile(converted_graph_module, backend="eager")',
}
CUSTOM_IMPORTS = {
    "from torch.ao.quantization._pte2.quantizer.Quantizer": (
        "from quantc.flows.pt2e.quantizer import Quantizer, OperatorConfig\n"
        "from quantc.flows.pt2e import prepare_pt2e\nfrom typing import List"
    )
}


def test_the_worked_example_runs() -> None:
    torch.manual_seed(0)
    left = run(UX, IMPORTS, READINGS, {})
    x = left["example_inputs"]
    with torch.no_grad():
        assert torch.equal(left["compiled"](*x), left["converted_graph_module"](*x))
        assert sqnr(left["model"](*x), left["converted_graph_module"](*x)) > 30


def test_without_step_3_it_is_refused() -> None:
    """The steps of the document go from 2 to 4: scales would be made up."""
    readings = {name: read for name, read in READINGS.items() if "Step 4" not in name}
    with pytest.raises(CalibrationError, match="seen no data"):
        run(UX, IMPORTS, readings, {})


def test_the_skeleton_of_a_quantizer_runs() -> None:
    """As it stands it annotates nothing, which is refused by name."""
    with pytest.raises(AnnotationError, match="CustomQuantizer annotated nothing"):
        run(CUSTOM, CUSTOM_IMPORTS, {}, {"torch": torch, "m": exported()})


# -- the items -------------------------------------------------------------------------------------------------------


class M(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 10)

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(x)


X = torch.randn(1, 5, generator=torch.Generator().manual_seed(0))


def exported(model: nn.Module | None = None) -> Any:
    torch.manual_seed(0)
    return torch.export.export((model or M()).eval(), (X,)).module()


def quantizer() -> qq.QNNPackQuantizer:
    return qq.QNNPackQuantizer().set_global(qq.get_symmetric_quantization_config(is_per_channel=True))


def prepared() -> fx.GraphModule:
    made = prepare_pt2e(exported(), quantizer())
    with torch.no_grad():
        made(X)
    return made


def observers(module: fx.GraphModule) -> list[nn.Module]:
    return [part for name, part in module.named_children() if name.startswith("activation_post_process_")]


class Alone(Quantizer):
    """Sets the observer of a single node."""

    def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
        for node in model.graph.find_nodes(op="call_function", target=aten.linear.default):
            spec = QuantizationSpec(torch.uint8, MinMaxObserver, 0, 255, torch.per_tensor_affine)
            node.meta["quantization_annotation"] = QuantizationAnnotation({}, spec)
        return model

    def validate(self, model: fx.GraphModule) -> None:
        if not any("quantization_annotation" in node.meta for node in model.graph.nodes):
            raise AnnotationError("there is no linear layer")


def item_2_1() -> None:
    """Capture into flattened ATen, then quantize that graph."""
    module = exported(nn.Sequential(nn.Sequential(nn.Linear(5, 5), nn.ReLU()), nn.Linear(5, 2)))
    kinds = {str(node.target).partition(".")[0] for node in module.graph.nodes if node.op == "call_function"}
    assert kinds == {"aten"}
    assert prepare_pt2e(module, quantizer()) is not module


def item_2_2() -> None:
    """Coverage of both captures, measured: the same program."""
    model = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 2)).eval()
    reports = [qc.prepare(qc.capture(model, (X,), method), "qnnpack").coverage() for method in ("export", "fx")]
    assert [row.verdict for row in reports[0].rows] == [row.verdict for row in reports[1].rows]
    assert "100.0%" in str(to_program(convert_pt2e(prepared())).coverage())


def item_2_3() -> None:
    """`convert_pt2e, prepare_pt2e` come in one import."""
    assert {"convert_pt2e", "prepare_pt2e"} <= set(quantc.flows.pt2e.__all__)


def item_2_4() -> None:
    """The quantizer's module is a submodule."""
    assert qq.__name__ == "quantc.flows.pt2e.qnnpack_quantizer"


def item_2_5() -> None:
    """`QNNPackQuantizer()` takes no arguments."""
    assert isinstance(qq.QNNPackQuantizer(), Quantizer)


def item_2_6() -> None:
    """`get_symmetric_quantization_config(is_per_channel=True)`."""
    config = qq.get_symmetric_quantization_config(is_per_channel=True)
    assert config.weight is not None
    assert config.weight.qscheme == torch.per_channel_symmetric
    assert config.input_activation is not None
    assert config.input_activation.dtype is torch.int8


def item_2_7() -> None:
    """`set_global` applies to everything, and chains."""
    made = qq.QNNPackQuantizer()
    config = qq.get_symmetric_quantization_config()
    assert made.set_global(config) is made
    assert made.global_config is config


def item_2_8() -> None:
    """prepare gives a prepared GraphModule."""
    assert isinstance(prepared(), fx.GraphModule)
    assert len(observers(prepared())) == 3


def item_2_9() -> None:
    """convert gives the quantized GraphModule."""
    converted = convert_pt2e(prepared())
    assert isinstance(converted, fx.GraphModule)
    assert sum(decomposed(node, "dequantize") for node in converted.graph.nodes) == 3


def item_2_10() -> None:
    """The rest of the PT2 stack takes it: torch.compile and torch.export."""
    converted = convert_pt2e(prepared())
    with torch.no_grad():
        assert torch.equal(torch.compile(converted, backend="aot_eager")(X), converted(X))
        assert torch.equal(torch.export.export(converted, (X,)).module()(X), converted(X))


def item_2_11() -> None:
    """The worked example: Linear(5, 10), input (1, 5), eval mode."""
    model = M().eval()
    torch.manual_seed(0)
    assert convert_pt2e(prepared())(X).shape == model(X).shape == (1, 10)


def item_2_12() -> None:
    """Observers or fake quantizers, as the quantizer says: training is in scope."""
    assert all(isinstance(part, ObserverBase) for part in observers(prepared()))
    assert any(isinstance(part, HistogramObserver) for part in observers(prepared()))
    config = qq.get_symmetric_quantization_config(is_per_channel=True, is_qat=True)
    torch.manual_seed(0)
    module: Any = torch.export.export(M().train(), (X,)).module()
    trained = prepare_qat_pt2e(module, qq.QNNPackQuantizer().set_global(config))
    assert all(isinstance(part, FakeQuantizeBase) for part in observers(trained))
    trained(X).sum().backward()
    assert all(part.grad is not None for part in trained.parameters())


def item_2_13() -> None:
    """The parameters are a GraphModule and a Quantizer; other things are refused."""
    assert list(inspect.signature(prepare_pt2e).parameters)[:2] == ["model", "quantizer"]
    with pytest.raises(ValueError, match="Linear"):
        prepare_pt2e(nn.Linear(2, 2), quantizer())  # type: ignore[arg-type]


def item_2_14() -> None:
    """A backend's quantizer, or a subclass of one's own."""
    for made in (quantizer(), Alone()):
        assert observers(prepare_pt2e(exported(), made))


def item_2_15() -> None:
    """convert takes what prepare gave, and nothing else."""
    assert next(iter(inspect.signature(convert_pt2e).parameters)) == "model"
    with pytest.raises(CalibrationError, match="no observers"):
        convert_pt2e(exported())


def item_2_16() -> None:
    """Observers are set node by node."""
    (observer,) = observers(prepare_pt2e(exported(), Alone()))
    assert isinstance(observer, MinMaxObserver)


def item_2_17() -> None:
    """`get_supported_operators()` tells the capabilities, of an instance and of the class."""
    rows = quantizer().get_supported_operators()
    known = {target for row in rows for pattern in row.operators for target in pattern}
    assert {aten.linear.default, aten.conv2d.default, aten.sigmoid.default} <= known
    assert known == {
        target for row in qq.QNNPackQuantizer.get_supported_operators() for p in row.operators for target in p
    }


def item_2_18() -> None:
    """A backend's quantizer has its own way of being configured."""
    config = qq.get_symmetric_quantization_config()
    with pytest.raises(AnnotationError, match="nothing"):
        prepare_pt2e(exported(), quantizer().set_module_name("linear", None))
    for made in (
        qq.QNNPackQuantizer().set_module_name("linear", config),
        qq.QNNPackQuantizer().set_module_type(nn.Linear, config),
        qq.QNNPackQuantizer().set_operator_type(aten.linear, config),
    ):
        assert len(observers(prepare_pt2e(exported(), made))) == 3


def item_2_19() -> None:
    """`annotate(model) -> GraphModule` is abstract."""
    assert "annotate" in Quantizer.__abstractmethods__
    module = exported()
    assert quantizer().annotate(module) is module


def item_2_20() -> None:
    """`validate(model) -> None` is abstract, and looks at the annotated graph."""
    assert "validate" in Quantizer.__abstractmethods__
    module = quantizer().annotate(exported())
    quantizer().validate(module)
    (node,) = module.graph.find_nodes(op="call_function", target=aten.linear.default)
    wide = QuantizationSpec(torch.int16, MinMaxObserver, -32768, 32767, torch.per_tensor_affine)
    node.meta["quantization_annotation"].input_qspec_map[node.args[0]] = wide
    with pytest.raises(AnnotationError, match="cannot run"):
        quantizer().validate(module)


def item_2_21() -> None:
    """`get_supported_operators(cls)` lists ATen operators, module types or functionals."""
    assert inspect.ismethod(Quantizer.get_supported_operators)
    assert Alone.get_supported_operators() == []
    from quantc.flows.pt2e import EmbeddingQuantizer

    (row,) = EmbeddingQuantizer.get_supported_operators()
    assert [nn.Embedding] in row.operators
    assert [nn.functional.embedding] in row.operators


def item_2_22() -> None:
    """`OperatorConfig` is a config and its operators."""
    config, operators = qq.QNNPackQuantizer.get_supported_operators()[0]
    assert OperatorConfig(config, operators).operators is operators


def item_2_23() -> None:
    """`prepare_pt2e(m, CustomQuantizer())`."""
    made = prepare_pt2e(exported(), Alone())
    made(X)
    (node,) = [node for node in convert_pt2e(made).graph.nodes if decomposed(node, "quantize")]
    assert node.args[-1] is torch.uint8


def item_2_24() -> None:
    """One pattern language is offered: a quantizer of a table of one's own."""
    from dataclasses import replace

    from quantc.backends.qnnpack import QNNPACK
    from quantc.flows.pt2e.backend_quantizer import BackendQuantizer
    from quantc.flows.pt2e.qnnpack_quantizer import QNNPACK_INT8

    class WithoutLinear(BackendQuantizer):
        backend = replace(QNNPACK_INT8, table=QNNPACK.table.without("linear").without("linear-computed"))
        known_configs = staticmethod(lambda: [qq.get_symmetric_quantization_config()])

    made = WithoutLinear().set_global(qq.get_symmetric_quantization_config())
    model = nn.Sequential(nn.Linear(5, 5), nn.Sigmoid())
    assert len(observers(prepare_pt2e(exported(model), made))) == 2  # the sigmoid's


def item_2_25() -> None:
    """Export, prepare, calibrate, convert."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    module = prepare_pt2e(exported(model), quantizer())
    batches = [torch.randn(1, 5) for _ in range(32)]
    with torch.no_grad():
        for batch in batches:
            module(batch)
        converted = convert_pt2e(module)
        assert sqnr(torch.cat([model(b) for b in batches]), torch.cat([converted(b) for b in batches])) > 30


def item_2_slips() -> None:
    """The heading's name is offered too."""
    assert convert_to_pt2e is convert_pt2e


ITEMS = {
    name.removeprefix("item_").replace("_", "."): check for name, check in globals().items() if name.startswith("item_")
}


@pytest.mark.parametrize("check", [pytest.param(check, id=name) for name, check in ITEMS.items()])
def test_item(check: Any) -> None:
    check()


def test_every_item_has_its_test() -> None:
    assert set(ITEMS) == {*(f"2.{number}" for number in range(1, 26)), "2.slips"}
