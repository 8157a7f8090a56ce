"""Writing in place: where it is the same as not writing, and where it is not."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.case import Case, floats, tags


class InPlaceActivations(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)
        self.relu6 = nn.ReLU6(inplace=True)

    def forward(self, x: Tensor) -> Any:
        y = self.a(x).relu_()
        y = F.relu(self.b(y), inplace=True)
        y = self.relu6(y + 1)
        y = F.leaky_relu_(y - 1, 0.2)
        return torch.sigmoid_(y.clamp_(-1.0, 0.5)).mul(2)


class InPlaceArithmetic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        z = self.fc(x)
        z += y
        z -= 1
        z *= 2.5
        z /= y.abs() + 1
        z.add_(y, alpha=0.5).sub_(x)
        z.neg_().masked_fill_(z > 1, 1.0)
        z.addcmul_(x, y, value=0.1)
        return z


class UsedAgain(nn.Module):
    """The target of a write is read afterwards through its old name: both names must see the new values."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        z = F.relu_(y)
        return y + z * 2, y.sum()


class SavedBefore(nn.Module):
    """A value computed from the target before the write keeps its old numbers; a view of it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        y = self.fc(x)
        before = y * 1
        view = y[:, :4]
        y.mul_(3)
        return before + y, view


class WriteToView(nn.Module):
    """Writes through views: the base changes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        y = self.fc(x)
        y.view(-1, 2, 4)[:, 0].add_(1)
        y.t()[3].zero_()
        y.unflatten(1, (2, 4)).select(1, 1).relu_()
        y.narrow(1, 6, 2).copy_(x[:, :2])
        return y


class SetItems(nn.Module):
    """Assignment to slices, columns, masks and index lists of a fresh tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        y = self.fc(x)
        y[:, 0] = 1.0
        y[:, 1] = x[:, 2]
        y[..., 2:4] = x[..., :2] * 2
        y[:, -1] += 5
        y[y > 2] = 2.0
        return y


class IndexPut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        y = self.fc(x)
        columns = torch.tensor([1, 3, 3])
        y = y.index_put((torch.tensor([0]), torch.tensor([2])), torch.tensor(7.0))
        y = y.index_add(1, columns, x[:, :3])
        y.scatter_(1, torch.tensor([[0], [1]]), 9.0)
        return y.index_fill_(1, torch.tensor([6]), -1.0)


class InputClone(nn.Module):
    """Writing to a copy of the input leaves the caller's tensor alone."""

    def forward(self, x: Tensor) -> Any:
        y = x.clone()
        y.relu_()
        z = x.detach().clone().add_(1)
        return y + x, z


class WritesInput(nn.Module):
    """The model writes to its own input: the caller must see it."""

    def forward(self, x: Tensor) -> Any:
        x.mul_(2)
        x[:, 0] = 0
        return x.sum(dim=1) + 1


class WritesMaybeCopy(nn.Module):
    """`reshape` and `contiguous` of a permuted tensor copy; of a plain one they do not."""

    def forward(self, x: Tensor) -> Any:
        y = x + 1
        same = y.reshape(-1, 2, 4)
        same.mul_(2)
        moved = y.t().contiguous()
        moved.add_(10)
        again = y.contiguous()
        again.sub_(1)
        return y, moved


class InPlaceResidual(nn.Module):
    """`out += identity` where identity is itself rectified in place afterwards, as in old ResNet code."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Any:
        identity = self.conv(x)
        out = self.bn(self.relu(identity))
        out += identity
        out = self.relu(out)
        out2 = self.conv(out)
        out2.add_(out)
        out.mul_(0.5)
        return out2, out


class Zeroed(nn.Module):
    """Creation and filling of tensors sized by the input."""

    def forward(self, x: Tensor) -> Any:
        y = torch.zeros_like(x)
        y[:, ::2] = x[:, 1::2]
        y.fill_diagonal_(1.0)
        z = torch.empty_like(x).copy_(y).unsqueeze_(1).squeeze_(1)
        return z.transpose_(0, 1) if z.dim() == 2 else z


CASES = (
    Case("inplace_activations", InPlaceActivations, floats(8), shape_free=True, tags=tags("inplace")),
    Case(
        "inplace_arithmetic",
        InPlaceArithmetic,
        lambda b: (torch.randn(b, 8), torch.randn(b, 8)),
        tags=tags("inplace"),
    ),
    Case("inplace_used_again", UsedAgain, floats(3, 6, 6), tags=tags("inplace")),
    Case("inplace_saved_before", SavedBefore, floats(8), tags=tags("inplace")),
    Case("inplace_view", WriteToView, floats(8), tags=tags("inplace")),
    Case("inplace_set_items", SetItems, floats(8), tags=tags("inplace")),
    Case("inplace_index_put", IndexPut, floats(8), fixed_batch="it writes to rows 0 and 1", tags=tags("inplace")),
    Case("inplace_input_clone", InputClone, floats(8), tags=tags("inplace")),
    Case("inplace_writes_input", WritesInput, floats(8), tags=tags("inplace")),
    Case("inplace_maybe_copy", WritesMaybeCopy, floats(8), tags=tags("inplace")),
    Case("inplace_residual", InPlaceResidual, floats(4, 6, 6), tags=tags("inplace")),
    Case(
        "inplace_zeroed",
        Zeroed,
        floats(8),
        fixed_batch="fill_diagonal_ looks which side is longer",
        tags=tags("inplace"),
    ),
)
