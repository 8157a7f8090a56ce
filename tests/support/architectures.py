"""Real architectures in plain torch: their true structure at widths that run in a moment, weights seeded.

What the zoo holds as a whole network is taken from there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from quantc.bench.networks import MobileNetV2
from tests.support.image_architectures import (
    ConvNeXt,
    EfficientNet,
    MobileNetV3,
    ResNet18,
    Swin,
    TwinTowers,
    UnusedOutputs,
    VideoNet,
)
from tests.support.sequence_architectures import DLRM, GPT, T5, Conformer, EinsumAttention, Llama, WaveNet, Whisper
from tests.zoo.case import Case, Inputs, floats
from tests.zoo.recurrent import Tagger
from tests.zoo.transformers import Bert, ViT
from tests.zoo.vision import UNet


def words(length: int, vocabulary: int) -> Inputs:
    return lambda batch: (torch.randint(0, vocabulary, (batch, length)),)


def padded_words(batch: int) -> tuple[Any, ...]:
    lengths = torch.randint(4, 13, (batch, 1))
    mask = torch.arange(12)[None] < lengths
    return torch.randint(1, 40, (batch, 12)) * mask, mask.long()


CASES: tuple[Case, ...] = (
    Case("resnet18", ResNet18, floats(3, 64, 64)),
    Case("mobilenet_v2", MobileNetV2, floats(3, 32, 32)),
    Case("mobilenet_v3", MobileNetV3, floats(3, 64, 64)),
    Case("efficientnet", EfficientNet, floats(3, 64, 64)),
    Case("convnext", ConvNeXt, floats(3, 32, 32)),
    Case("unet", UNet, floats(3, 16, 16)),
    Case("vit", lambda: ViT(64, 4, 3), floats(3, 16, 16)),
    Case("swin", Swin, floats(3, 32, 32)),
    Case("video", VideoNet, floats(3, 6, 24, 24)),
    Case("twin_towers", TwinTowers, lambda b: (torch.randn(b, 3, 16, 16), torch.randn(b, 3, 16, 16))),
    Case("unused_outputs", UnusedOutputs, floats(3, 8, 8)),
    Case("bert", lambda: Bert(64, 4, 2), padded_words),
    Case("gpt", GPT, words(12, 96)),
    Case("llama", Llama, words(12, 96)),
    Case("t5", T5, words(12, 64)),
    Case("whisper", Whisper, lambda b: (torch.randn(b, 20, 24), torch.randint(0, 64, (b, 8)))),
    Case("conformer", Conformer, floats(16, 48)),
    Case("einsum_attention", EinsumAttention, floats(10, 48)),
    Case("wavenet", WaveNet, floats(8, 48)),
    Case("dlrm", DLRM, lambda b: (torch.randn(b, 13), torch.randint(0, 50, (b, 4, 3)))),
    Case("lstm_tagger", lambda: Tagger(nn.LSTM(12, 32, batch_first=True, bidirectional=True), 64), words(10, 32)),
    Case("gru_tagger", lambda: Tagger(nn.GRU(12, 32, num_layers=2, batch_first=True), 32), words(10, 32)),
)
