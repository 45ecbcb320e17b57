"""Serves models by vLLM, in an environment of its own: ``served.py CASE FOLDER`` prints what came out as JSON.

vLLM runs in this process, but with several workers. Each case but ``architectures`` is a process of its own: memory
that a model before it has left could hold the right weights.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

import datastates as ds
from datastates.providers import from_stateful

CASE = sys.argv[1]
os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "0|1" if CASE == "parallel" else "auto",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if CASE == "parallel" else "0",
}

PROMPT = [1, 2, 3, 4, 5]
SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "max_position_embeddings": 128,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
WITHOUT_GROUPS = {name: size for name, size in SMALL.items() if name != "num_key_value_heads"}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("LlamaConfig", SMALL),
    "Qwen2ForCausalLM": ("Qwen2Config", SMALL),
    "Qwen3ForCausalLM": ("Qwen3Config", SMALL | {"head_dim": 32}),
    "MistralForCausalLM": ("MistralConfig", SMALL),
    "Gemma2ForCausalLM": ("Gemma2Config", SMALL | {"head_dim": 32}),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", SMALL | {"head_dim": 32}),
    "GPT2LMHeadModel": ("GPT2Config", WITHOUT_GROUPS),
    "OPTForCausalLM": ("OPTConfig", WITHOUT_GROUPS | {"ffn_dim": 256, "word_embed_proj_dim": 128}),
    "Phi3ForCausalLM": ("Phi3Config", SMALL | {"pad_token_id": 0}),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", WITHOUT_GROUPS),
    "Qwen2MoeForCausalLM": ("Qwen2MoeConfig", SMALL | EXPERTS | {"shared_expert_intermediate_size": 64}),
    "Qwen3MoeForCausalLM": ("Qwen3MoeConfig", SMALL | EXPERTS | {"head_dim": 32}),
    "OlmoeForCausalLM": ("OlmoeConfig", SMALL | {"num_experts": 4, "num_experts_per_tok": 2}),
    "Olmo2ForCausalLM": ("Olmo2Config", SMALL),
    "GraniteForCausalLM": ("GraniteConfig", SMALL),
    "CohereForCausalLM": ("CohereConfig", SMALL),
    "FalconForCausalLM": ("FalconConfig", WITHOUT_GROUPS),
    "StableLmForCausalLM": ("StableLmConfig", SMALL),
    "Starcoder2ForCausalLM": ("Starcoder2Config", SMALL),
    "MixtralForCausalLM": ("MixtralConfig", SMALL | {"num_local_experts": 4}),
}


def made(architecture: str = "LlamaForCausalLM", **more: Any) -> Any:
    """A model with random weights, norms and biases among them, whose layers weigh more than the token before."""
    kind, shapes = ARCHITECTURES[architecture]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**shapes, **more, architectures=[architecture])
    model = getattr(transformers, architecture)(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.add_(torch.randn_like(weight) * 0.1)
            elif not any(part in name for part in ("emb", "wte", "wpe", "head")):
                weight.mul_(6)
    return model


def save(model: Any, folder: Path, step: int = 1) -> Path:
    """Save a training checkpoint with an optimizer, and the configuration beside it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for weight in model.parameters():
        weight.grad = torch.randn_like(weight)
    optimizer.step()
    with ds.Checkpointer(folder) as checkpointer:
        providers = [from_stateful("model", model), from_stateful("optim", optimizer)]
        checkpointer.snapshot(providers, step=step).wait_committed()
    model.config.save_pretrained(folder)
    return folder


def expected(model: Any) -> list[int]:
    """The tokens that transformers continues with."""
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = model.generate(torch.tensor([PROMPT]), **options)[0, len(PROMPT) :].tolist()
    assert len(set(found)) > 1, found
    return found


def engine(folder: Path, **more: Any) -> Any:
    """An engine of vLLM."""
    from vllm import LLM

    options = {"skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 64, "max_num_seqs": 4}
    return LLM(str(folder), **options, dtype="float32", **{"load_format": "datastates", **more})


def tokens(llm: Any) -> list[int]:
    """The tokens that an engine continues with."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=8)
    return list(llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)[0].outputs[0].token_ids)


def refusal(folder: Path, **more: Any) -> str:
    """The error of an engine that does not start."""
    try:
        found = tokens(engine(folder, **more))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"no error: {found}"


def architectures(folder: Path) -> Any:
    found = {}
    for name in ARCHITECTURES:
        model = made(name)
        save(model, folder / name)
        theirs = expected(model)  # before vLLM serves it: it changes GPTNeoX's classes
        found[name] = refusal(folder / name), f"no error: {theirs}"
    return found


def parallel(folder: Path) -> Any:
    model = made()
    return tokens(engine(save(model, folder), tensor_parallel_size=2, gpu_memory_utilization=0.4)), expected(model)


def tied(folder: Path) -> Any:
    model = made(tie_word_embeddings=True)
    return tokens(engine(save(model, folder))), expected(model)


def other_formats(folder: Path) -> Any:
    model = made()
    torch.save({"net": model.state_dict()}, folder / "m.pt")
    model.config.save_pretrained(folder)
    return tokens(engine(folder, model_loader_extra_config={"checkpoint": str(folder / "m.pt")})), expected(model)


def reloading(folder: Path) -> Any:
    model = made()
    llm = engine(save(model, folder, 1))
    before = tokens(llm), expected(model)
    save(model, folder, 2)
    llm.collective_rpc("reload_weights")
    llm.reset_prefix_cache()
    after = tokens(llm), expected(model)
    return [before[0], after[0]], [before[1], after[1]]


def missing(folder: Path) -> Any:
    model = made()
    state = {name: weight for name, weight in model.state_dict().items() if "1.self_attn.o_proj" not in name}
    torch.save({"model": state}, folder / "m.pt")
    model.config.save_pretrained(folder)
    return refusal(folder, model_loader_extra_config={"checkpoint": str(folder / "m.pt")})


if __name__ == "__main__":
    case = globals()[CASE]
    print("\n" + json.dumps(case(Path(sys.argv[2]))))
