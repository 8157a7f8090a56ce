"""`import quantc` loads what every use needs, and the rest when it is used."""

from __future__ import annotations

import subprocess
import sys

import quantc

HEAVY = (
    "networkx",
    "onnx",
    "executorch",
    "quantc.flows",
    "quantc.nn",
    "quantc.qat",
    "quantc.targets",
    "rich",
    "sympy",
    "torch._dynamo",
    "typer",
)


def in_fresh_process(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_heavy_modules_are_imported_when_used() -> None:
    loaded = in_fresh_process("import sys, torch, quantc\nprint(*sys.modules, sep='\\n')").split()
    assert "quantc" in loaded
    assert [name for name in HEAVY if name in loaded] == []


def test_training_modules_do_not_import_the_compiler() -> None:
    in_fresh_process("import sys, quantc.qat.fake\nassert 'torch._dynamo' not in sys.modules")


def test_every_public_name_is_found_in_a_fresh_process() -> None:
    code = "from quantc import *\nimport quantc\nassert not {*quantc.__all__} - {*dir()}\nassert {*quantc.__all__} <= {*dir(quantc)}"
    in_fresh_process(code)


def test_a_module_does_not_replace_a_function_of_its_name() -> None:
    in_fresh_process(
        "import warnings\nwarnings.simplefilter('ignore')\nimport quantc, quantc.capture.capture_attempt, quantc.parse\n"
        "assert quantc.capture.__name__ == 'capture' and quantc.parse.__name__ == 'parse'"
    )


def test_ops_of_exported_files_are_registered() -> None:
    in_fresh_process(
        "import torch, quantc\n"
        "names = ('linear', 'conv', 'lookup', 'steps', 'linear_grouped', 'embedding', 'stored_weight', 'choose_qparams', "
        "'quantize_float')\nassert all(hasattr(torch.ops.quantc, name) for name in names)"
    )


def test_checks_and_op_names_that_register_on_import_are_there() -> None:
    in_fresh_process(
        "from quantc.errors import SpecError\nfrom quantc.spec.spec import Observe, QuantSpec\nimport quantc as qc\n"
        "try:\n    qc.INT8.but(observe='no-such-observation')\nexcept SpecError as error:\n    assert 'no-such' in str(error)\n"
        "else:\n    raise AssertionError('not refused')\n"
        "from quantc.text.target_names import ON_DEMAND\nassert 'quantized_decomposed' in ON_DEMAND"
    )


def test_names_that_are_not_public_are_not_found() -> None:
    assert not hasattr(quantc, "no_such_name")
