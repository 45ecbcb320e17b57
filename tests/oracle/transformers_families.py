"""Families of models of transformers, as small as they can be made."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import transformers
from subject import Case, Subject
from trained import Inputs, floats, ints, training

TEXT: Inputs = {"input_ids": ints(32, 2, 6)}
BOTH: Inputs = {"input_ids": ints(32, 2, 6), "decoder_input_ids": ints(32, 2, 4)}
IMAGE: Inputs = {"pixel_values": floats(2, 3, 8, 8)}

ENCODER = {
    **{"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"max_position_embeddings": 32, "pad_token_id": 0},
}
DECODER = {**ENCODER, "num_key_value_heads": 1, "head_dim": 8, "bos_token_id": 1, "eos_token_id": 2}
LAYERS = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
SEQUENCES = {**LAYERS, "d_model": 16, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 32}
EXPERTS = {**DECODER, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
PATCHES = {**VISION, "image_size": 8, "patch_size": 4}


@dataclass(frozen=True)
class Family:
    """One class of models.

    Attributes:
        options: Arguments of its configuration.
        inputs: What it is called with.
    """

    options: dict[str, Any]
    inputs: Inputs = field(default_factory=lambda: TEXT)


FAMILIES: dict[str, Family] = {
    "BertForMaskedLM": Family(ENCODER),
    "RobertaForSequenceClassification": Family(ENCODER),
    "AlbertModel": Family({**ENCODER, "embedding_size": 8}),
    "DebertaV2Model": Family({**ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "DistilBertModel": Family({"vocab_size": 32, "dim": 16, "hidden_dim": 32, "n_layers": 2, "n_heads": 2}),
    "GPT2LMHeadModel": Family({"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}),
    "GPTNeoXForCausalLM": Family(ENCODER),
    "BloomForCausalLM": Family({"vocab_size": 32, "hidden_size": 16, "n_layer": 2, "n_head": 2}),
    "FalconForCausalLM": Family(ENCODER),
    "LlamaForCausalLM": Family(DECODER),
    "MistralForCausalLM": Family(DECODER),
    "MixtralForCausalLM": Family({**DECODER, "num_local_experts": 4}),
    "Qwen3ForCausalLM": Family(DECODER),
    "Qwen3MoeForCausalLM": Family({**EXPERTS, "num_experts": 4}),
    "Gemma3ForCausalLM": Family({**DECODER, "sliding_window": 4}),
    "Phi3ForCausalLM": Family(DECODER),
    "Olmo2ForCausalLM": Family(DECODER),
    "DeepseekV3ForCausalLM": Family(
        {
            **{**EXPERTS, "num_key_value_heads": 2, "n_routed_experts": 4, "n_group": 2, "topk_group": 1},
            **{"first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4},
            **{"qk_nope_head_dim": 4, "v_head_dim": 8, "head_dim": 4},
        }
    ),
    "MambaForCausalLM": Family({"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}),
    "Mamba2ForCausalLM": Family(
        {
            **{"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4},
            **{"num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4},
        }
    ),
    "T5ForConditionalGeneration": Family(
        {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}, BOTH
    ),
    "BartForConditionalGeneration": Family({**SEQUENCES, "max_position_embeddings": 32}, BOTH),
    "WhisperForConditionalGeneration": Family(
        {
            **{**SEQUENCES, "num_mel_bins": 4, "max_source_positions": 8, "max_target_positions": 8},
            **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
        },
        {"input_features": floats(2, 4, 16), "decoder_input_ids": ints(32, 2, 4)},
    ),
    "Wav2Vec2ForCTC": Family(
        {
            **{**ENCODER, "conv_dim": (8, 8), "conv_kernel": (4, 2), "conv_stride": (2, 2), "mask_time_length": 2},
            **{"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2},
        },
        {"input_values": floats(2, 64)},
    ),
    "ViTForImageClassification": Family(PATCHES, IMAGE),
    "Dinov2Model": Family(PATCHES, IMAGE),
    "SwinModel": Family(
        {"image_size": 8, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 2},
        IMAGE,
    ),
    "ConvNextModel": Family({"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 2}, IMAGE),
    "CLIPModel": Family({"text_config": ENCODER, "vision_config": PATCHES, "projection_dim": 8}, {**TEXT, **IMAGE}),
    "SiglipModel": Family({"text_config": ENCODER, "vision_config": PATCHES}, {**TEXT, **IMAGE}),
}
"""By the name of the model's class."""


def subject_of(name: str) -> Subject:
    """A model and its optimizer."""
    kind, family = getattr(transformers, name), FAMILIES[name]
    return training(kind(kind.config_class(**family.options)).train(), family.inputs)


def cases() -> list[Case]:
    """All of them."""
    return [Case(name, partial(subject_of, name)) for name in FAMILIES]
