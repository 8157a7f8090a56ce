"""Architectures of the `transformers` package at the size of a test, with random weights: no files are read."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")

HIDDEN, TOKENS = 32, 97
TEXT = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": TOKENS,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**TEXT, "num_key_value_heads": 2}
IMAGE = {
    **{key: TEXT[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")},
    "image_size": 16,
    "patch_size": 4,
}
EXPERTS = {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
ENCODER_DECODER = {
    "d_model": HIDDEN,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": TOKENS,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}


@dataclass(frozen=True)
class Architecture:
    """A configuration, the model that is made of it, and what it reads."""

    family: str
    head: str
    options: dict[str, Any] = field(default_factory=dict)
    reads: str = "input_ids"
    config: str = ""

    def model(self) -> nn.Module:
        """The model in eval mode, with gains far from 1."""
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, self.config or f"{self.family}Config")(**self.options)
        config.use_cache = False
        config._experts_implementation = "batched_mm"  # plain products, in the place of an op of the package
        model = getattr(transformers, f"{self.family}{self.head}")(config)
        with torch.no_grad():
            for value in model.parameters():
                if value.dim() == 1:
                    value += torch.randn(value.shape) / 4
        return Plain(model.eval(), self.reads).eval()

    def inputs(self) -> tuple[Tensor, ...]:
        return INPUTS[self.reads]()


class Plain(nn.Module):
    """A model as a function of tensors that returns one."""

    def __init__(self, model: nn.Module, reads: str) -> None:
        super().__init__()
        self.model, self.reads = model, reads

    def forward(self, *inputs: Tensor) -> Tensor:
        names = {
            "both": ("input_ids", "decoder_input_ids"),
            "speech": ("input_features", "decoder_input_ids"),
            "pair": ("input_ids", "pixel_values"),
        }
        given = dict(zip(names.get(self.reads, (self.reads,)), inputs, strict=True))
        found: Tensor = self.model(**given, return_dict=False)[0]
        return found


def _tokens() -> Tensor:
    return torch.randint(3, TOKENS, (2, 7), generator=torch.Generator().manual_seed(0))


def _noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


INPUTS: dict[str, Callable[[], tuple[Tensor, ...]]] = {
    "input_ids": lambda: (_tokens(),),
    "both": lambda: (_tokens(), _tokens()),
    "pixel_values": lambda: (_noise(2, 3, 16, 16),),
    "input_values": lambda: (_noise(2, 800),),
    "speech": lambda: (_noise(2, 8, 64), _tokens()),
    "pair": lambda: (_tokens(), _noise(2, 3, 16, 16)),
}


def _many(names: str, head: str, options: dict[str, Any], reads: str = "input_ids", **more: Any) -> list[Architecture]:
    return [Architecture(name, head, {**options, **more}, reads) for name in names.split()]


ZOO: tuple[Architecture, ...] = (
    *_many("Llama Mistral Qwen2 Phi3 StableLm Starcoder2 Olmo Olmo2 Granite Cohere Cohere2 SmolLM3 Exaone4", "ForCausalLM", GROUPED),
    *_many("Qwen3 Gemma Gemma2 Glm Helium Nemotron", "ForCausalLM", GROUPED, head_dim=8),
    Architecture("Gemma3", "ForCausalLM", {**GROUPED, "head_dim": 8}, config="Gemma3TextConfig"),
    *_many("Phi Persimmon GPTNeoX", "ForCausalLM", TEXT),
    Architecture("GPT2", "LMHeadModel", {"n_embd": HIDDEN, "n_layer": 2, "n_head": 4, "vocab_size": TOKENS, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2}),
    Architecture("GPTJ", "ForCausalLM", {"n_embd": HIDDEN, "n_layer": 2, "n_head": 4, "vocab_size": TOKENS, "n_positions": 64, "rotary_dim": 4, "bos_token_id": 1, "eos_token_id": 2}),
    Architecture("GPTNeo", "ForCausalLM", {"hidden_size": HIDDEN, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "vocab_size": TOKENS, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2}),
    Architecture("GPTBigCode", "ForCausalLM", {"n_embd": HIDDEN, "n_layer": 2, "n_head": 4, "vocab_size": TOKENS, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2}),
    Architecture("CodeGen", "ForCausalLM", {"n_embd": HIDDEN, "n_layer": 2, "n_head": 4, "vocab_size": TOKENS, "n_positions": 64, "rotary_dim": 4, "bos_token_id": 1, "eos_token_id": 2}),
    Architecture("OPT", "ForCausalLM", {**TEXT, "ffn_dim": 64, "word_embed_proj_dim": HIDDEN}),
    Architecture("Bloom", "ForCausalLM", {"hidden_size": HIDDEN, "n_layer": 2, "n_head": 4, "vocab_size": TOKENS, "bos_token_id": 1, "eos_token_id": 2}),
    Architecture("Falcon", "ForCausalLM", TEXT),
    Architecture("Mpt", "ForCausalLM", {"d_model": HIDDEN, "n_layers": 2, "n_heads": 4, "vocab_size": TOKENS, "max_seq_len": 64}),
    Architecture("XGLM", "ForCausalLM", {"d_model": HIDDEN, "num_layers": 2, "attention_heads": 4, "ffn_dim": 64, "vocab_size": TOKENS, "max_position_embeddings": 64}),
    Architecture("Mamba", "ForCausalLM", {"hidden_size": HIDDEN, "num_hidden_layers": 2, "state_size": 8, "vocab_size": TOKENS}),
    *_many("Qwen2Moe Qwen3Moe Olmoe", "ForCausalLM", EXPERTS, head_dim=8, shared_expert_intermediate_size=48),
    Architecture("Mixtral", "ForCausalLM", {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    Architecture("GraniteMoe", "ForCausalLM", {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    *_many("Bert Roberta Electra XLMRoberta Camembert RoFormer Ernie", "ForMaskedLM", TEXT),
    Architecture("Albert", "ForMaskedLM", {**TEXT, "embedding_size": 16}),
    Architecture("DistilBert", "ForMaskedLM", {"dim": HIDDEN, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "vocab_size": TOKENS, "max_position_embeddings": 64, "pad_token_id": 0}),
    *_many("Deberta DebertaV2", "ForMaskedLM", {**TEXT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    Architecture("ModernBert", "ForMaskedLM", {**TEXT, "cls_token_id": 1, "sep_token_id": 2}),
    Architecture("MPNet", "ForMaskedLM", {**TEXT, "pad_token_id": 1}),
    Architecture("T5", "ForConditionalGeneration", {"d_model": HIDDEN, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": TOKENS, "decoder_start_token_id": 0}, "both"),
    Architecture("MT5", "ForConditionalGeneration", {"d_model": HIDDEN, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": TOKENS, "decoder_start_token_id": 0}, "both"),
    *_many("Bart MBart Pegasus", "ForConditionalGeneration", ENCODER_DECODER, "both"),
    Architecture("Marian", "MTModel", ENCODER_DECODER, "both"),
    Architecture("Whisper", "ForConditionalGeneration", {**ENCODER_DECODER, "num_mel_bins": 8, "max_source_positions": 32, "max_target_positions": 64}, "speech"),
    *_many("ViT DeiT Beit Dinov2", "ForImageClassification", IMAGE, "pixel_values"),
    Architecture("Swin", "ForImageClassification", {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 2}, "pixel_values"),
    Architecture("ConvNext", "ForImageClassification", {"depths": [1, 1], "hidden_sizes": [16, 32], "num_stages": 2, "image_size": 16, "patch_size": 2}, "pixel_values"),
    Architecture("CLIPText", "ModelWithProjection", {**TEXT, "projection_dim": 16}),
    Architecture("CLIPVision", "ModelWithProjection", {**IMAGE, "projection_dim": 16}, "pixel_values"),
    Architecture("SiglipVision", "Model", IMAGE, "pixel_values"),
    *_many("Wav2Vec2 Hubert", "ForCTC", {**TEXT, "conv_dim": [16, 16], "conv_kernel": [10, 3], "conv_stride": [5, 2], "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}, "input_values"),
)  # fmt: skip
