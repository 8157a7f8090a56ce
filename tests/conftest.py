"""All tests run on one thread: they are small, and several run at once."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
