"""The warning for sums that the processor at hand cuts off: it names the ops and both instruction sets."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import quantc as qc
from quantc.annotate.quantizer import Backend
from quantc.backends.x86 import X86
from quantc.ir.program import Program
from quantc.targets.kernels import saturation
from quantc.targets.kernels.kernel import Kernel
from quantc.targets.kernels.saturation import (
    INSTRUCTION_SETS_HERE,
    can_saturate,
    instruction_set_here,
    warn_of_saturation,
)


def converted(backend: str | Backend, reduce_range: str = "auto") -> Program:
    """Two linear layers whose weights are all alike: without room any two products saturate."""
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    x = torch.linspace(-1, 1, 64).reshape(4, 16)
    prepared = qc.prepare(qc.capture(model, (x,)), backend)
    qc.calibrate(prepared, [(x,)])
    return qc.convert(prepared, reduce_range=reduce_range)  # type: ignore[arg-type]


def kernels(program: Program) -> list[tuple[str, Kernel]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        children = qc.lower(program, "x86").module.named_children()
    return [(name, module) for name, module in children if isinstance(module, Kernel)]


@pytest.fixture
def avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this processor were one without VNNI, whatever it is."""
    for name in ("instruction_set_here", "instruction_set_of_processor"):
        monkeypatch.setattr(saturation, name, lambda: "avx2")


def told(program: Program) -> str:
    with pytest.warns(UserWarning, match="sums can saturate") as caught:
        warn_of_saturation(kernels(program), program)
    return str(caught[0].message)


@pytest.mark.usefixtures("avx2")
def test_a_program_for_another_instruction_set_is_warned_about_by_name() -> None:
    program = converted("qnnpack")
    message = told(program)
    names = [name for name, kernel in kernels(program) if can_saturate(kernel)]
    assert len(names) == 2
    assert message.startswith(f"sums can saturate in {', '.join(names)}: ")
    assert f"{program.name} was converted for neon (backend qnnpack), and this processor is avx2" in message
    assert "Quantize for a backend whose instruction set is avx2, such as x86" in message


@pytest.mark.usefixtures("avx2")
def test_a_program_for_this_one_is_told_what_was_switched_off() -> None:
    message = told(converted("x86", "no"))
    assert "this processor, avx2, adds two products of bytes in 16 bits" in message
    assert 'reduce_range="auto"' in message
    assert "was converted for" not in message


@pytest.mark.usefixtures("avx2")
@pytest.mark.parametrize("reduce_range", ["auto", "weights", "activations"])
def test_what_convert_made_room_for_is_not_warned_about(reduce_range: str) -> None:
    program = converted("x86", reduce_range)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_saturation(kernels(program), program)


@pytest.mark.usefixtures("avx2")
def test_a_program_for_processors_with_vnni_is_warned_about_too() -> None:
    assert "was converted for avx-vnni (backend x86)" in told(converted(replace(X86, instruction_set="avx-vnni")))


def test_processors_that_add_in_32_bits_are_not_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    program = converted("x86", "no")
    monkeypatch.setattr(saturation, "_is_cut_off", lambda: False)
    assert instruction_set_here() == ""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_saturation(kernels(program), program)


FEWER_INSTRUCTIONS = {
    "FBGEMM_ENABLE_INSTRUCTIONS": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "ATEN_CPU_CAPABILITY": "avx2",
}


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() not in INSTRUCTION_SETS_HERE, reason="x86 alone")
@pytest.mark.parametrize("names", [tuple(FEWER_INSTRUCTIONS), ("FBGEMM_ENABLE_INSTRUCTIONS",), ("ONEDNN_MAX_CPU_ISA",)])
def test_kernels_are_asked_and_not_the_processor(names: tuple[str, ...]) -> None:
    """Environment variables hold torch's engines to fewer instructions than the processor has, each by itself."""
    code = "from quantc.targets.kernels.saturation import adds_in_16_bits; print(adds_in_16_bits())"
    held = {**os.environ, **{name: FEWER_INSTRUCTIONS[name] for name in names}}
    done = subprocess.run([sys.executable, "-c", code], env=held, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


@pytest.mark.usefixtures("avx2")
def test_an_engine_outside_torch_is_warned_about_as_well() -> None:
    program = converted("onnx", "no")
    with pytest.warns(
        UserWarning, match="sums can saturate in linear, linear_1: this processor, avx2, adds two products"
    ):
        qc.lower(program, "x86", engine="onnxruntime")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qc.lower(converted("onnx"), "x86", engine="onnxruntime")
