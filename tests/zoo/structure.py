"""What goes in and out, and what is shared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.zoo.case import Case, floats, tags, tokens


class TwoTowers(nn.Module):
    """Several inputs, several outputs, an output used inside as well."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Conv2d(3, 4, 3)
        self.text = nn.Linear(6, 4)

    def forward(self, image: Tensor, text: Tensor) -> Any:
        left = self.image(image).mean(dim=(2, 3))
        right = self.text(text)
        return (left * right).sum(-1), left, [right, text]


class DictModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(6, 4)
        self.right = nn.Linear(5, 4)

    def forward(self, batch: dict[str, Tensor]) -> Any:
        left, right = self.left(batch["left"]), self.right(batch["right"])
        return {"sum": left + right, "parts": {"left": left, "right": [right]}}


class NestedInputs(nn.Module):
    def forward(self, pair: tuple[Tensor, list[Tensor]], scale: Tensor) -> Any:
        first, rest = pair[0], pair[1]
        return first * scale + rest[0] - rest[1]


@dataclass
class Answer:
    logits: Tensor
    hidden: Tensor


pytree.register_dataclass(Answer)


class Pair(NamedTuple):
    mean: Tensor
    spread: Tensor


class DataclassModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Answer:
        hidden = torch.sigmoid(self.body(x))
        return Answer(logits=self.head(hidden), hidden=hidden)


class NamedTupleModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Pair:
        mean, spread = self.body(x).chunk(2, -1)
        return Pair(mean, F.softplus(spread))


class KeywordModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor, *, bias: Tensor, scale: Tensor | None = None) -> Any:
        y = self.fc(x) + bias
        return y if scale is None else y * scale


class ConstantInputs(nn.Module):
    """A number, a flag and a None among the inputs: fixed at capture."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor, times: int, twice: bool, mask: Tensor | None = None) -> Any:
        y = self.fc(x) * times
        if twice:
            y = self.fc(y)
        return y if mask is None else y * mask


class PassThrough(nn.Module):
    """Outputs that are an input, a parameter, a number, None, and the same tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Any:
        y = x * self.weight
        return x, self.weight, y, y, 3, None


class TiedLanguageModel(nn.Module):
    """The embedding and the output layer are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.body = nn.Linear(16, 16)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Any:
        return self.head(torch.tanh(self.body(self.embed(ids))))


class SharedModule(nn.Module):
    """One module called twice, and a container called at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        x = self.block(x)
        x = self.fc(self.fc(x))
        return self.block(x) + x


class SharedWeight(nn.Module):
    """Two modules, one weight, two biases; the weight is also used directly, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Any:
        return self.b(torch.relu(self.a(x))) @ self.a.weight.t()


class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.list = nn.ModuleList([nn.Linear(8, 8), nn.Identity(), nn.Linear(8, 8)])
        self.dict = nn.ModuleDict({"relu": nn.ReLU(), "gate.x".replace(".", "_"): nn.Sigmoid()})
        self.scales = nn.ParameterList([nn.Parameter(torch.randn(8)) for _ in range(2)])
        self.named = nn.ParameterDict({"shift": nn.Parameter(torch.randn(8))})
        self.nested = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Sequential()), nn.Identity(), nn.Tanh())

    def forward(self, x: Tensor) -> Any:
        for layer, scale in zip(self.list, [*self.scales, 1.0], strict=True):
            x = layer(x) * scale
        return self.nested(self.dict["relu"](x) + self.dict["gate_x"](x) + self.named["shift"])


class Bags(nn.Module):
    """Embedding with padding and scaling, and embedding bags with and without offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Embedding(32, 6, padding_idx=3)
        self.mean = nn.EmbeddingBag(32, 6, mode="mean")
        self.sum = nn.EmbeddingBag(32, 6, mode="sum", include_last_offset=False)

    def forward(self, ids: Tensor) -> Any:
        offsets = torch.tensor([0, 2, 5])
        return self.plain(ids).sum(1) + self.mean(ids), self.sum(ids[0], offsets)


CASES = (
    Case("two_towers", TwoTowers, lambda b: (torch.randn(b, 3, 5, 5), torch.randn(b, 6)), tags=tags("tree")),
    Case(
        "dict_in_and_out",
        DictModel,
        lambda b: ({"left": torch.randn(b, 6), "right": torch.randn(b, 5)},),
        tags=tags("tree"),
    ),
    Case(
        "nested_inputs",
        NestedInputs,
        lambda b: ((torch.randn(b, 4), [torch.randn(b, 4), torch.randn(b, 4)]), torch.randn(b, 1)),
        tags=tags("tree"),
    ),
    Case("dataclass_out", DataclassModel, floats(6), tags=tags("tree")),
    Case("namedtuple_out", NamedTupleModel, floats(6), tags=tags("tree")),
    Case("keyword_inputs", KeywordModel, floats(6), lambda b: {"bias": torch.randn(b, 6)}, tags=tags("tree")),
    Case(
        "keyword_inputs_all",
        KeywordModel,
        floats(6),
        lambda b: {"scale": torch.randn(b, 6), "bias": torch.randn(b, 6)},
        tags=tags("tree"),
    ),
    Case("constant_inputs", ConstantInputs, lambda b: (torch.randn(b, 6), 3, True, None), tags=tags("tree")),
    Case("pass_through", PassThrough, floats(4), tags=tags("tree")),
    Case("tied_weights", TiedLanguageModel, tokens(5), shape_free=True, tags=tags("shared", "train")),
    Case("shared_module", SharedModule, floats(8), shape_free=True, tags=tags("shared", "train")),
    Case("shared_weight", SharedWeight, floats(8), shape_free=True, tags=tags("shared", "train")),
    Case("containers", Containers, floats(8), shape_free=True, tags=tags("shared", "train")),
    Case("embedding_bags", Bags, tokens(6), fixed_batch="the bag offsets are fixed numbers", tags=tags("shared")),
)
