"""Kernels that both targets share: they need no engine's packing and no instruction set."""

from __future__ import annotations

from quantc.targets.kernels.kernel_table import kernels_for
from quantc.targets.kernels.qnnpack_shared import SHARED


def makers(target: str, *modules: str) -> set[tuple[str, object]]:
    """Ops and makers of some modules; of all if none are named."""
    return {
        (op, maker)
        for op, each in kernels_for(target).items()
        for maker in each
        if not modules or maker.__module__.rpartition(".")[2] in modules
    }


def test_everything_that_the_shared_modules_offer_is_offered_for_both() -> None:
    assert makers("x86", *SHARED)
    assert makers("qnnpack", *SHARED) == makers("x86", *SHARED)


def test_every_shared_module_has_something_to_offer() -> None:
    assert all(makers("x86", name) for name in SHARED)


def test_kernels_of_x86_engines_are_not_shared() -> None:
    engines = ("int8_conv", "fbgemm_conv", "float_conv", "int8_linear", "int8_conv_transpose")
    assert not makers("qnnpack", *engines)


def test_nothing_is_offered_twice() -> None:
    for each in kernels_for("qnnpack").values():
        assert len(each) == len(set(each))


def test_the_ops_that_need_no_weight_are_there_for_both() -> None:
    for op in ("sum", "mul", "requantize", "max_pool2d", "sum_over", "normalize", "softmax", "matmul"):
        assert op in kernels_for("qnnpack"), op
