"""Integer lowering of quantized embeddings: rows are looked up as integers, then dequantized.

`embedding_bag` has no integer form. It sums rows that have different scales, weighted by numbers known at run time
only, and yields float.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantc.integer.library import OPS, integer_op
from quantc.integer.match_lowering import NotIntegerError, Task
from quantc.integer.semantics import computes
from quantc.spec.aten_arithmetic import aten, center

LOOKED_UP = "out = f32(wq − wz) · sw of the rows that are looked up, in float32"


@integer_op("embedding(Tensor w, Tensor? w_zero_point, Tensor scale, Tensor indices) -> Tensor", formula=LOOKED_UP)
def embedding(w: Tensor, w_zero_point: Tensor | None, scale: Tensor, indices: Tensor) -> Tensor:
    """Rows of a quantized table, with one scale or one per row, as float32."""
    rows = aten.embedding.default(w, indices)
    rows = center(rows, 0 if w_zero_point is None else _of_rows(w_zero_point, indices))
    real: Tensor = aten.mul.Tensor(aten.to.dtype(rows, torch.float32), _of_rows(scale, indices))
    return real


def _of_rows(values: Tensor, indices: Tensor) -> Tensor:
    """The numbers that go with the rows that are looked up, or the one for all."""
    if not values.dim():
        return values
    chosen: Tensor = aten.unsqueeze.default(aten.index.Tensor(values, [indices]), -1)
    return chosen


@computes("embedding", formula=LOOKED_UP)
def _embedding(task: Task) -> None:
    w = task.quantized(task.argument("w"))
    if w.grid.axis not in (None, 0):
        raise NotIntegerError(f"the table's scales lie along axis {w.grid.axis}, not one for each row")
    zeros = task.keep("weight_zero_point", w.grid.zero_point) if bool(w.grid.zero_point.any()) else None
    numbers = (zeros, task.keep("scale", w.grid.scale.float()), task.argument("indices"))
    task.replace(task.core, task.emit(OPS["embedding"].target, w.node, *numbers, dtype=torch.float32, like=task.core))
