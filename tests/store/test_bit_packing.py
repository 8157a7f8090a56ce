"""Size on disk is really packed, and told truthfully.

Sizes are those of files. What lies in them is read with safetensors and NumPy alone.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import nn

import quantc as qc
from quantc.backends.x86 import X86
from quantc.inspect.size import file_size
from quantc.ir.program import Program
from quantc.spec.capability import Capability
from quantc.spec.spec import QuantSpec
from quantc.text.digests import constants, graph_constants
from tests.support.paths import TESTS
from tests.support.store_files import images, taken_apart
from tests.support.stored_tensors import bits

OLD = TESTS / "data" / "version1.qc"
"""A calibrated and quantized program with weights of 4 bits, written by the first version of the format."""


def weights_in(program: Program, spec: QuantSpec) -> Program:
    """Quantized so, for x86 if it also took that spec: no kernel of it takes 3 or 6 bits.

    Ranges are those of min and max: how a scale is found changes no size, and this is the fastest.
    """
    backend = dataclasses.replace(X86, takes=(*X86.takes, Capability.of(spec)))
    return qc.convert(qc.prepare(program, backend, config=qc.QuantConfig().set_all(spec.but(observe="minmax"))))


# -- how large ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stack() -> Program:
    """Three linears: 1024 to 1024 to 2048 to 1024, 21 MB of float32."""
    with torch.random.fork_rng():
        torch.manual_seed(11)
        layers = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 2048), nn.Linear(2048, 1024)).eval()
        return qc.capture(layers, (torch.randn(1, 1024),))


LIMITS: dict[str, tuple[QuantSpec, float, float]] = {
    "int4 groups": (qc.INT4_GROUP, 0.150, 4 + (16 + 4) / 32),
    "int4 groups, symmetric": (qc.INT4_GROUP_SYMMETRIC, 0.160, 4 + 32 / 32),
    "int2 groups": (qc.INT2_GROUP, 0.086, 2 + (16 + 2) / 32),
    "int3 groups": (qc.INT4_GROUP.but(dtype="int3"), 0.118, 3 + (16 + 3) / 32),
    "int6 groups": (qc.INT4_GROUP.but(dtype="int6"), 0.215, 6 + (16 + 6) / 32),
    "int8 channels": (qc.INT8_WEIGHT_ONLY, 0.255, 8),
    "fp8": (qc.FP8_E4M3_WEIGHT, 0.255, 8),
    "fp16": (qc.FP16_WEIGHT, 0.505, 16),
}
"""The largest share of the float file, and the bits that a weight takes: its own, and its part of scale and zero point."""


@pytest.mark.parametrize("case", LIMITS)
def test_a_file_is_as_small_as_its_bits(case: str, stack: Program, tmp_path: Path) -> None:
    spec, limit, bits_each = LIMITS[case]
    program = weights_in(stack, spec)
    program.save(tmp_path / "model.qc")
    save_file({name: tensor.detach() for name, tensor in constants(stack).items()}, tmp_path / "float.safetensors")
    whole, in_float = ((tmp_path / name).stat().st_size for name in ("model.qc", "float.safetensors"))
    assert whole <= limit * in_float, whole / in_float
    found = file_size(program)
    assert found is not None
    assert found.whole == whole
    weights = 1024 * 1024 + 1024 * 2048 + 2048 * 1024
    others = 4 * (1024 + 2048 + 1024) * (2 if spec.dtype.bits == 8 else 1)  # biases, and scales of channels
    assert found.constants <= weights * bits_each / 8 + others
    loaded = qc.load(tmp_path / "model.qc")
    x = torch.randn(2, 1024)[:1]
    assert torch.equal(loaded(x), program(x))
    for name, tensor in constants(program).items():
        assert bits(constants(loaded)[name]) == bits(tensor)


def test_the_plan_stores_no_scale_again(stack: Program, tmp_path: Path) -> None:
    program = weights_in(stack, qc.INT4_GROUP)
    program.save(tmp_path / "model.qc")
    document, tensors = taken_apart(tmp_path / "model.qc")
    assert not [name for name in tensors if name.startswith("qparams/")]
    rows = {name: row for name, row in document["records"].items() if name.startswith("qparams/")}
    assert len(rows) == 6
    assert all(row["at"].startswith("constants/") for row in rows.values())
    loaded = qc.load(tmp_path / "model.qc")
    for name, qparams in program.plan.qparams.items():
        assert loaded.plan.qparams[name].equals(qparams)


def test_what_is_loaded_shares_no_memory(stack: Program, tmp_path: Path) -> None:
    """A scale is in the plan and in the graph. Changing the one in the graph must not change the other."""
    weights_in(stack, qc.INT4_GROUP_SYMMETRIC).save(tmp_path / "model.qc")
    loaded = qc.load(tmp_path / "model.qc")
    tensors = [
        *graph_constants(loaded).values(),
        *(part for qparams in loaded.plan.qparams.values() for part in (qparams.scale, qparams.zero_point)),
    ]
    memory = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    assert len(set(memory)) == len(memory)
    before = {name: bits(qparams.scale) for name, qparams in loaded.plan.qparams.items()}
    for tensor in graph_constants(loaded).values():
        tensor.detach().zero_()
    assert {name: bits(qparams.scale) for name, qparams in loaded.plan.qparams.items()} == before


def fields(data: NDArray[np.uint8], count: int, width: int) -> NDArray[np.int64]:
    """Numbers of so many bits, the first in the lowest of each byte."""
    each = np.unpackbits(data, bitorder="little").reshape(-1, width)
    found: NDArray[np.int64] = (each[:count].astype(np.int64) << np.arange(width)).sum(1)
    return found


def signed(data: NDArray[np.uint8], count: int, width: int) -> NDArray[np.int64]:
    """Fields of 4, 2 and 1 bits that add up to the width, one after another; the highest bit counts negative."""
    total, start, shift = np.zeros(count, np.int64), 0, 0
    for field in (4, 2, 1):
        if width & field:
            length = -(-count * field // 8)
            total += fields(data[start : start + length], count, field) << shift
            start, shift = start + length, shift + field
    assert start == len(data)
    return total - ((total >> (width - 1)) << width)


@pytest.mark.parametrize("width", [2, 3, 4, 6])
def test_numpy_reads_the_same_weights(width: int, tmp_path: Path) -> None:
    """Levels, zero points and bfloat16 scales, taken from the file without quantc, give torch's dequantized weight."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        program = qc.capture(nn.Linear(64, 48).eval(), (torch.randn(2, 64),))
    weights_in(program, qc.INT4_GROUP.but(dtype=f"int{width}")).save(tmp_path / "model.qc")
    document, tensors = taken_apart(tmp_path / "model.qc")
    records = document["records"]
    assert records["constants/weight_quantized"] == {"form": "packed", "type": "i8[48,64]", "bits": width}
    levels = signed(tensors["constants/weight_quantized"].numpy(), 48 * 64, width).reshape(48, 2, 32)
    zero = records["constants/weight_zero_point"]
    zeros = signed(tensors["constants/weight_zero_point"].numpy(), 48 * 2, zero["bits"]).reshape(48, 2, 1)
    halves = tensors["constants/weight_scale"].view(torch.int16).numpy().view(np.uint16)
    scales = (halves.astype(np.uint32) << 16).view(np.float32).reshape(48, 2, 1)
    weight = ((levels - zeros).astype(np.float32) * scales).reshape(48, 64)
    x = torch.eye(64)
    bias = program.root.get_parameter("bias").detach()
    expected = torch.nn.functional.linear(x, torch.from_numpy(weight), bias)
    loaded = qc.load(tmp_path / "model.qc")
    results = [loaded(part) - bias for part in torch.split(x, 2)]
    assert torch.allclose(torch.cat(results), expected - bias, atol=1e-6)
    held = graph_constants(loaded)
    assert np.array_equal(held["weight_quantized"].numpy().reshape(-1), levels.reshape(-1))
    assert np.array_equal(held["weight_zero_point"].numpy().reshape(-1), zeros.reshape(-1))
    assert np.array_equal(held["weight_scale"].numpy().reshape(-1), scales.reshape(-1))


# -- old files ---------------------------------------------------------------------------------------------------


def test_files_of_the_first_version_still_load(tmp_path: Path) -> None:
    document, tensors = taken_apart(OLD)
    assert {row["form"] for row in document["records"].values()} == {"plain", "filled", "packed", "narrow"}
    loaded = qc.load(OLD)
    packed = tensors["constants/conv.weight_quantized"].numpy()
    levels = signed(packed, 6 * 3 * 3 * 3, 4)
    assert np.array_equal(graph_constants(loaded)["conv.weight_quantized"].numpy().reshape(-1), levels)
    expected = [
        [-0.2307, -0.4198, -0.0962, 0.5291, 0.0660, -0.0379],
        [-0.2073, -0.4192, -0.1062, 0.5517, 0.0739, -0.0477],
    ]
    assert torch.allclose(loaded(images(3)), torch.tensor(expected), atol=1e-4)
    loaded.save(tmp_path / "new.qc")
    again = qc.load(tmp_path / "new.qc")
    assert again.dump() == loaded.dump()
    assert str(again.plan) == str(loaded.plan)
    assert (tmp_path / "new.qc").stat().st_size < OLD.stat().st_size
