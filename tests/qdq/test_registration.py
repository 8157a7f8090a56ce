"""The ops of the Q/DQ form: those quantc defines for a torch without them are torch's, schema and numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quantc.qdq.registration import OPS, decomposed_ops
from quantc.text.target_names import ON_DEMAND

BYTES = (-128, 127, torch.int8)
NARROW = (-100, 90, torch.int8)


def overload(schema: str) -> Any:
    """torch's own op of a schema."""
    name, _, kind = schema.partition("(")[0].partition(".")
    return getattr(getattr(decomposed_ops(), name), kind or "default")


def run(schema: str, *args: Any, **kwargs: Any) -> Tensor:
    """quantc's own implementation."""
    implementation: Any = OPS[schema]
    found: Tensor = implementation(*args, **kwargs)
    return found


def numbers(*shape: int) -> Tensor:
    """Beyond the range, on ties, and in between."""
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))) * 4
    drawn.view(-1)[:4] = torch.tensor([1e4, -1e4, 0.125, -0.375])
    return drawn


def levels(*shape: int) -> Tensor:
    return torch.randint(-100, 91, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(3))


SCALES, ZEROS = torch.tensor([0.25, 0.01, 0.5]), torch.tensor([3, -7, 20])
GROUPS = torch.tensor([[0.25, 0.01], [0.5, 0.125], [1.0, 0.03]]), torch.tensor([[3, 3], [-4, 0], [9, -9]])
TOKENS = SCALES.reshape(3, 1), ZEROS.reshape(3, 1).int()
CALLS: dict[str, list[tuple[Any, ...]]] = {
    "quantize_per_tensor": [(numbers(3, 4), 0.25, 5, *BYTES), (numbers(3, 4), 0.037, -3, *NARROW)],
    "quantize_per_tensor.tensor": [(numbers(3, 4), torch.tensor(0.25), torch.tensor(5), *NARROW)],
    "dequantize_per_tensor": [(levels(3, 4), 0.037, 5, *BYTES)],
    "dequantize_per_tensor.tensor": [(levels(3, 4), torch.tensor(0.037), torch.tensor(5), *BYTES)],
    "quantize_per_channel": [(numbers(3, 4), SCALES, ZEROS, 0, *BYTES), (numbers(2, 4, 3), SCALES, ZEROS, 2, *NARROW)],
    "dequantize_per_channel": [
        (levels(3, 4), SCALES, ZEROS, 0, *BYTES),
        (levels(2, 3, 4), SCALES, None, 1, *BYTES),
    ],
    "quantize_per_token": [(numbers(3, 4), *TOKENS, *BYTES)],
    "dequantize_per_token": [(levels(3, 4), *TOKENS, *BYTES, torch.float32)],
    "quantize_per_channel_group": [(numbers(3, 8), *GROUPS, *NARROW, 4)],
    "dequantize_per_channel_group": [
        (levels(3, 8), *GROUPS, *BYTES, 4, torch.float32),
        (levels(3, 8), GROUPS[0], None, *BYTES, 4, torch.float32),
    ],
}


@pytest.mark.parametrize("schema", OPS, ids=lambda schema: schema.partition("(")[0])
def test_the_schema_is_torchs(schema: str) -> None:
    assert str(overload(schema)._schema) == f"quantized_decomposed::{schema}"


@pytest.mark.parametrize("schema", OPS, ids=lambda schema: schema.partition("(")[0])
def test_the_numbers_are_torchs(schema: str) -> None:
    for args in CALLS[schema.partition("(")[0]]:
        expected, found = overload(schema)(*args), run(schema, *args)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


def test_a_float_type_can_be_asked_for() -> None:
    found = {
        schema.partition("(")[0]: run(schema, *CALLS[schema.partition("(")[0]][0], out_dtype=torch.float64).dtype
        for schema in OPS
        if "out_dtype" in schema
    }
    assert found == dict.fromkeys(
        ("dequantize_per_tensor", "dequantize_per_tensor.tensor", "dequantize_per_channel"), torch.float64
    )


def test_the_namespace_is_torchs_and_is_filled_when_text_names_it() -> None:
    assert decomposed_ops() is torch.ops.quantized_decomposed
    assert ON_DEMAND["quantized_decomposed"]() is torch.ops.quantized_decomposed
