"""transformers reads what was exported from a model, and gives the same logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import datastates as ds
from datastates.providers import from_stateful

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS: dict[str, tuple[Any, Any]] = {
    "GPT-2, tied": (GPT2LMHeadModel, GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4)),
    "Llama": (LlamaForCausalLM, LlamaConfig(**SMALL)),
    "Llama, tied": (LlamaForCausalLM, LlamaConfig(**SMALL, tie_word_embeddings=True)),
    "Mixtral": (MixtralForCausalLM, MixtralConfig(**SMALL, num_local_experts=4)),
}


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shard_size", ["5GB", "20KB"])
def test_from_pretrained_gives_the_same_logits(name: str, shard_size: str, tmp_path: Path) -> None:
    kind, config = MODELS[name]
    torch.manual_seed(0)
    model = kind(config).eval()
    optimizer = torch.optim.AdamW(model.parameters())
    providers = [from_stateful("model", model), from_stateful("optimizer", optimizer)]
    ds.snapshot(providers, tmp_path / "saved").wait_committed()
    done = ds.export(tmp_path / "saved", tmp_path / "out", keys="model/*", shard_size=shard_size)
    assert (len(done.files) > 1) == (shard_size == "20KB")
    model.config.save_pretrained(tmp_path / "out")
    loaded, found = kind.from_pretrained(tmp_path / "out", use_safetensors=True, output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    tokens = torch.arange(20).reshape(2, 10)
    assert torch.equal(loaded.eval()(tokens).logits, model(tokens).logits)
