"""The ops that only move values, or choose among them: what they yield on integers are integers they were given."""

from __future__ import annotations

from quantc.ir.dialect import ops_in
from quantc.ir.op_row import MOVES as MOVE_FAMILIES
from quantc.ir.op_row import Family

MOVES = ops_in(*MOVE_FAMILIES, Family.EXTREME, overloads=True)
