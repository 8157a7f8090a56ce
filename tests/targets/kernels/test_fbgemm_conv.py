"""fbgemm's int8 convolutions: they take zero points of weights, and hand quantized tensors on."""

from __future__ import annotations

from tests.support.byte_convs import plain


def test_sums_far_beyond_the_range_of_a_result() -> None:
    """fbgemm rounds to 32 bits before it cuts off: what does not fit would become the least level."""
    layer = plain(factor=2e4)
    x = layer.input(2, 4, 6, 5)
    kernels, reasons = layer.kernels(x)
    assert [kernel.family for kernel in kernels] == ["onednn", "float32"]
    assert any("32 bits do not hold" in reason for reason in reasons)
    layer.check(x)
