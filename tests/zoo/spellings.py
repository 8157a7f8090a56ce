"""One op, many spellings: functions, methods, operators, modules."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.case import Case, floats, tags


class FunctionalConvNet(nn.Module):
    """A CNN written with functions and loose parameters."""

    mean: Tensor
    var: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(6, 3, 3, 3) * 0.2)
        self.b1 = nn.Parameter(torch.randn(6) * 0.1)
        self.gamma = nn.Parameter(torch.rand(6) + 0.5)
        self.beta = nn.Parameter(torch.randn(6) * 0.1)
        self.w2 = nn.Parameter(torch.randn(4, 6) * 0.2)
        self.register_buffer("mean", torch.randn(6) * 0.1)
        self.register_buffer("var", torch.rand(6) + 0.5)

    def forward(self, x: Tensor) -> Any:
        y = F.conv2d(x, self.w1, self.b1, stride=1, padding=1)
        y = F.batch_norm(y, self.mean, self.var, self.gamma, self.beta, training=False, eps=1e-4)
        y = F.max_pool2d(torch.relu(y), kernel_size=2)
        y = F.dropout(F.avg_pool2d(y, 2), p=0.3, training=self.training)
        y = torch.conv2d(y, self.w1[:, :1].expand(6, 6, 3, 3), padding=(1, 1))
        return F.linear(y.mean(dim=[-2, -1]), self.w2)


class Relus(nn.Module):
    """Ten ways to write a rectifier and as many to clamp."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.relu6 = nn.ReLU6()
        self.hardtanh = nn.Hardtanh(-2.0, 2.0)

    def forward(self, x: Tensor) -> Any:
        rectified = [self.relu(x), F.relu(x), torch.relu(x), x.relu(), x.clamp(min=0), x.clamp_min(0), x.clamp(0)]
        rectified += [torch.clamp(x, 0), torch.max(x, torch.zeros_like(x)), torch.maximum(x, torch.tensor(0.0))]
        clamped = [self.relu6(x), F.relu6(x), F.hardtanh(x, 0.0, 6.0), x.clamp(0, 6), x.clamp(min=0.0, max=6.0)]
        clamped += [self.hardtanh(x), F.hardtanh(x), torch.clip(x, -1, 1), x.clamp_max(0.5), x.clip(max=2)]
        return sum(rectified[1:], rectified[0]), sum(clamped[1:], clamped[0])


class Activations(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.prelu = nn.PReLU(8)
        layers: list[nn.Module] = [
            nn.Hardswish(),
            nn.SiLU(),
            nn.GELU(),
            nn.GELU("tanh"),
            nn.LeakyReLU(0.2),
            nn.ELU(),
            nn.SELU(),
        ]
        layers += [nn.CELU(0.5), nn.Softplus(), nn.Sigmoid(), nn.Tanh(), nn.Hardsigmoid(), nn.Mish(), nn.LogSigmoid()]
        layers += [nn.Softmax(-1), nn.LogSoftmax(dim=1), nn.Softsign(), nn.Tanhshrink(), nn.Threshold(0.1, 0.2)]
        self.layers = nn.ModuleList([*layers, nn.Softmin(dim=1)])

    def forward(self, x: Tensor) -> Any:
        y = x
        for module in self.layers:
            y = y + module(x)
        y = y + F.hardswish(x) + F.silu(x) + F.gelu(x) + F.gelu(x, approximate="tanh") + F.leaky_relu(x)
        y = y + F.elu(x, alpha=0.3) + F.selu(x) + F.celu(x) + F.softplus(x) + F.sigmoid(x) + x.tanh() + F.mish(x)
        y = y + self.prelu(x) + F.prelu(x, self.prelu.weight[:1]) + torch.prelu(x, self.prelu.weight)
        y = y + F.hardsigmoid(x) + F.logsigmoid(x) + x.sigmoid() + F.glu(torch.cat([x, x], -1))
        y = (
            y
            + F.softmax(x, dim=-1, dtype=torch.float64).float()
            + x.softmax(1)
            + torch.softmax(x, 1, dtype=torch.float32)
        )
        return y + F.log_softmax(x, dim=1) + x.log_softmax(-1) + F.normalize(x, dim=-1)


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 8) * 0.3)
        self.b = nn.Parameter(torch.randn(6))
        self.bilinear = nn.Bilinear(8, 8, 3)

    def forward(self, x: Tensor) -> Any:
        flat = x.flatten(0, 1)
        a = F.linear(flat, self.w, self.b)
        b = torch.addmm(self.b, flat, self.w.t())
        c = flat @ self.w.T + self.b
        d = torch.matmul(flat, self.w.transpose(0, 1))
        e = flat.mm(self.w.t()) + torch.mm(flat, self.w.permute(1, 0))
        f = torch.einsum("bti,oi->bto", x, self.w)
        g = torch.bmm(x, x.transpose(1, 2)) + x.bmm(x.mT) + x.matmul(x.swapaxes(-1, -2))
        h = torch.baddbmm(g, x, x.mT, beta=0.5, alpha=2) + torch.einsum("bij,bkj->bik", [x, x])
        i = (x[0] @ x[0, 0]).sum() + torch.dot(x[0, 0], x[0, 1]) + torch.mv(x[0], x[0, 0]).mean()
        j = torch.outer(x[0, 0], x[0, 1]) + torch.tensordot(x[0].t(), x[0], dims=1)
        return a + b + c + d + e, f, g + h, i + j, self.bilinear(x, x.flip(-1))


class Reshapes(nn.Module):
    """`flatten`, `view` and `reshape` in every dress, with sizes read from the tensor."""

    def forward(self, x: Tensor) -> Any:
        y = torch.flatten(x, 1) + x.flatten(1) + x.view(x.size(0), -1) + x.reshape(x.shape[0], -1)
        y = y + x.view(x.size()[0], x.size(1) * x.size(2)) + x.reshape((x.shape[0], x.shape[1] * x.shape[2]))
        y = y + nn.Flatten()(x) + torch.reshape(x, [x.size(0), -1]) + x.contiguous().view(-1, x[0].numel())
        z = y.unflatten(1, (x.shape[1], x.shape[2])) + x.view_as(x) + x.reshape_as(x) + torch.unflatten(y, 1, (4, -1))
        return z, x.ravel(), x.view(-1).size(0)


class Moves(nn.Module):
    """Permuting, splitting, joining, repeating."""

    def forward(self, x: Tensor) -> Any:
        p = x.permute(0, 2, 1) + x.transpose(1, 2) + x.mT + x.swapaxes(1, 2) + torch.movedim(x, 1, 2)
        p = p + x.permute([0, 2, 1]) + torch.permute(x, (0, 2, 1)) + torch.swapdims(x, -1, -2) + x.moveaxis(-1, 1)
        a, b = x.chunk(2, dim=1)
        c, d = torch.split(x, 2, dim=1)
        loose: Any = x  # torch leaves the method untyped
        e, f, g = loose.split([1, 1, 2], 1)
        h = torch.stack(x.unbind(1), dim=1) + torch.cat([torch.hstack([a, b]), torch.concat((c, d), 1)], -1)[..., :6]
        s = torch.cat((e, f, g), dim=-2) + x.unsqueeze(1).squeeze(1) + x[:, None].squeeze() + x.roll(1, -1) + x.flip(1)
        t = x[:, :1].expand(-1, 4, -1) + x[:, :1].expand_as(x) + x[:, :1].repeat(1, 4, 1) + x[:, :1].tile((4, 1))
        t = t + torch.broadcast_to(x[:, -1:], x.shape) + torch.repeat_interleave(x[:, ::2], 2, 1)
        u = x.unfold(2, 3, 3).sum(-1), torch.tensor_split(x, 3, dim=1)[0], x.select(1, -1), x.narrow(1, 1, 2)
        return (
            p,
            h + s + t,
            u,
            torch.vstack((a, b)),
            x.diagonal(dim1=1, dim2=2),
            torch.tril(x),
            x[0].T.shape[0],
        )


class Slices(nn.Module):
    def forward(self, x: Tensor) -> Any:
        index = torch.tensor([2, 0, 1])
        a = x[:, 1:3], x[..., -1], x[:, None, :, ::2], x[0], x[-1, ..., 1:-1], x[:, :, None], x[:, -3:]
        b = x[:, index], x[:, [0, 2]], x.index_select(1, index), torch.gather(x, 2, x.argsort(-1)), x[:, index, index]
        c = torch.where(x > 0, x, -x), torch.where(x > 0, 1.0, x), x.masked_fill(x < 0, 0.0), x.masked_fill(x < 0, -1e9)
        d = (
            x.cumsum(-1),
            torch.cumprod(x, 1),
            x.sort(dim=-1),
            x.topk(2, dim=-1),
            x.gather(-1, x.argmax(-1, keepdim=True)),
        )
        return a, b, c, d


class Reductions(nn.Module):
    def forward(self, x: Tensor) -> Any:
        a = (
            x.mean(),
            x.mean(1),
            x.mean(dim=(1, 2)),
            torch.mean(x, -1, keepdim=True),
            x.mean([1], True),
            x.mean(dim=None),
        )
        b = x.sum(), x.sum(-1), torch.sum(x, dim=(0, 2)), x.sum(1, dtype=torch.float64), x.prod(1), x.logsumexp(-1)
        c = x.max(), x.max(1), x.max(dim=2, keepdim=True)[0], x.amax(), x.amax((1, 2)), x.min(1).values, x.amin(-1)
        d = (
            x.std(),
            x.std(1),
            x.var(dim=(1, 2)),
            x.var(1, unbiased=False),
            torch.var_mean(x, -1),
            x.std(-1, correction=0),
        )
        e = (
            x.norm(),
            x.norm(dim=-1),
            torch.linalg.vector_norm(x, 1, dim=1),
            x.argmax(),
            x.argmax(-1),
            x.any(1),
            (x > 0).all(),
        )
        return a, b, c, d, e


class Arithmetic(nn.Module):
    """Scalars on either side, powers, comparisons, logic."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        a = 1 - x, 2 / (x + 3), 1 + x, 3 * x, x - 1, x / 2, -x, +x, x // 0.5, x % 0.7, torch.rsub(x, 2), x.remainder(3)
        b = (
            x + y,
            torch.add(x, y, alpha=2),
            x.sub(y, alpha=0.5),
            torch.mul(x, y),
            x.div(y.abs() + 1, rounding_mode="floor"),
        )
        c = x**2, x.pow(3), torch.pow(x, 2.0), x.abs() ** 0.5, 2**x, x.abs().sqrt(), (x.abs() + 1).rsqrt(), x.square()
        d = (
            x > y,
            x >= 0,
            x.eq(y),
            (x > 0) & (y > 0),
            (x > 0) | (y < 0),
            ~(x > 0),
            torch.logical_xor(x > 0, y > 0),
            x != y,
        )
        e = (
            x.exp(),
            x.abs().add(1).log(),
            x.sin(),
            torch.cos(x),
            x.erf(),
            x.reciprocal(),
            torch.abs(x),
            x.sign(),
            x.round(),
        )
        f = (
            torch.minimum(x, y),
            torch.max(x, y),
            torch.min(x, y),
            torch.lerp(x, y, 0.3),
            torch.addcmul(x, x, y),
            x.floor(),
        )
        g = (
            x.expm1(),
            x.abs().log1p(),
            torch.atan2(x, y),
            torch.hypot(x, y),
            x.isnan(),
            x.trunc(),
        )
        return a, b, c, d, e, f, g


class Dtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor, n: Tensor) -> Any:
        a = (
            n.float() + x,
            n.to(x.dtype) * x,
            n.type_as(x),
            n.to(torch.float64),
            n.to(x),
            x.double(),
            x.to(dtype=torch.float16),
        )
        b = x.half().float(), x.bfloat16(), x.long(), x.int(), (x > 0).to(torch.int32), x.bool(), n / 2, n + 1.5, n * x
        c = (
            x.to("cpu"),
            x.to(x.device),
            x.to(x.device, x.dtype),
            x.cpu(),
            x.float(),
            self.fc(x.to(self.fc.weight.dtype)),
        )
        d = x.detach() + 1, x.contiguous(), x.clone() * 2, torch.detach(x), x.clone(memory_format=torch.preserve_format)
        return a, b, c, d


class Creations(nn.Module):
    """Tensors made inside forward, from the input's shape, dtype and device."""

    def forward(self, x: Tensor) -> Any:
        positions = torch.arange(x.shape[1], device=x.device)
        ramp = torch.arange(0, x.size(1), dtype=x.dtype, device=x.device)
        y = x + positions + ramp + torch.zeros(x.shape[0], x.shape[1]) + torch.ones(x.shape, dtype=x.dtype)
        y = y + x.new_zeros(x.shape[0], 1) + x.new_full((1,), 2.0) + torch.full((x.shape[1],), 0.5) + torch.tensor(3.0)
        y = (
            y
            + torch.zeros_like(x)
            + torch.ones_like(x)
            + torch.full_like(x, 2)
            + x.new_ones(x.size(1))
            + torch.eye(6)[0]
        )
        mask = positions[None, :] < positions[:, None]
        return (
            y,
            mask,
            torch.linspace(0, 1, 5) + torch.tensor([1.0, 2, 3, 4, 5]),
            F.one_hot(positions % 3, 3),
            torch.scalar_tensor(2),
        )


class Pads(nn.Module):
    def forward(self, x: Tensor) -> Any:
        a = F.pad(x, (1, 2)), F.pad(x, (1, 0, 2, 1), value=-1.0), F.pad(x, (1, 1), mode="reflect"), F.pad(x, [0, -1])
        b = (
            F.pad(x, (1, 1), mode="replicate"),
            F.pad(x, (2, 1), mode="circular"),
            F.pad(x, (0, 0)),
            torch.constant_pad_nd(x, (1, 1), 2.0),
        )
        return a, b


CASES = (
    Case("functional_conv_net", FunctionalConvNet, floats(3, 8, 8), tags=tags("spelling")),
    Case("spell_relus", Relus, floats(8), tags=tags("spelling")),
    Case("spell_activations", Activations, floats(8), tags=tags("spelling")),
    Case("spell_products", Products, floats(4, 8), tags=tags("spelling")),
    Case("spell_reshapes", Reshapes, floats(4, 6), tags=tags("spelling")),
    Case("spell_moves", Moves, floats(4, 6), tags=tags("spelling")),
    Case("spell_slices", Slices, floats(4, 6), tags=tags("spelling")),
    Case("spell_reductions", Reductions, floats(4, 6), tags=tags("spelling")),
    Case("spell_arithmetic", Arithmetic, lambda b: (torch.randn(b, 6), torch.randn(b, 6)), tags=tags("spelling")),
    Case("spell_dtypes", Dtypes, lambda b: (torch.randn(b, 6), torch.randint(0, 9, (b, 6))), tags=tags("spelling")),
    Case("spell_creations", Creations, floats(6), tags=tags("spelling")),
    Case("spell_pads", Pads, floats(4, 6), tags=tags("spelling")),
)
