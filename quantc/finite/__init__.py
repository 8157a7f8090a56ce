"""Numbers that are none: no grid has a level for NaN, and a scale that is infinite rounds everything to zero. What a
quantized program is given, and what it is made of, is finite, or refused by name."""

from quantc.finite.finite_constants import refuse_unsound, refuse_unsound_module
from quantc.finite.finite_inputs import Watch, check_has_numbers
from quantc.finite.finite_tensors import check_scales, why_not_finite

__all__ = ["Watch", "check_has_numbers", "check_scales", "refuse_unsound", "refuse_unsound_module", "why_not_finite"]
