"""Fine-tuning with frozen weights: what the libraries leave alone is not written again. Run with ``-s`` for a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import reflinks

pytestmark = pytest.mark.by_hand
BEGIN = f"""
import json, os, sys
sys.path.insert(0, {str(Path(reflinks.__file__).parent)!r})
import reflinks
import datastates as ds
from datastates.commit import trial
if sys.argv[2] == "ranges":
    reflinks.emulate()
else:
    trial.shares_ranges = lambda folder: False

def saved(root, providers, update, steps=3):
    # bytes written by each step, on this rank
    found = []
    with ds.Checkpointer(root, incremental=True) as checkpointer:
        for step in range(steps):
            update()
            snapshot = checkpointer.snapshot(providers, step=step)
            snapshot.wait_committed()
            found.append(snapshot.report.executor["bytes"])
    print(json.dumps(found))
"""
PEFT = """
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from datastates.providers import from_stateful

shape = dict(hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8, vocab_size=8192)
model = get_peft_model(LlamaForCausalLM(LlamaConfig(**shape)), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])

def update():
    optimizer.zero_grad()
    tokens = torch.randint(0, 8192, (2, 16))
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()

saved(sys.argv[1], [from_stateful("model", model), from_stateful("optimizer", optimizer)], update)
"""
FSDP = """
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from datastates.providers import from_stateful

dist.init_process_group("gloo")
torch.manual_seed(0)
layers = [torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 8), torch.nn.Linear(8, 1024))
          for _ in range(6)]
model = torch.nn.Sequential(*layers)
for layer in layers:
    layer[0].requires_grad_(False)
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])

def update():
    optimizer.zero_grad()
    model(torch.randn(4, 1024)).square().mean().backward()
    optimizer.step()

saved(sys.argv[1], [from_stateful("model", model), from_stateful("optimizer", optimizer)], update)
dist.destroy_process_group()
"""
JAX = """
import jax, jax.numpy as jnp, optax
from datastates.providers import from_pytree

base = {str(i): jax.random.normal(jax.random.key(i), (1024, 1024)) for i in range(12)}
lora = {str(i): jnp.zeros((1024, 4)) for i in range(12)}
optimizer = optax.adamw(1e-3)
held = {"base": base, "lora": lora, "state": optimizer.init(lora)}

def update():
    gradients = jax.tree.map(jnp.ones_like, held["lora"])
    updates, held["state"] = optimizer.update(gradients, held["state"], held["lora"])
    held["lora"] = optax.apply_updates(held["lora"], updates)

saved(sys.argv[1], [from_pytree("train", get=lambda: held, set=held.update)], update)
"""


@pytest.mark.parametrize("shared", ["ranges", "files"])
@pytest.mark.parametrize(
    ("name", "script", "count", "package"),
    [("peft", PEFT, 1, "peft"), ("FSDP2", FSDP, 2, "torch"), ("JAX, optax", JAX, 1, "optax")],
)
def test_the_frozen_weights_are_not_written_again(
    shared: str, name: str, script: str, count: int, package: str, ranks: Any, tmp_path: Path
) -> None:
    pytest.importorskip(package)
    done = ranks(count, BEGIN + script, tmp_path / "run", shared, timeout=200, imported=())
    by_rank = [json.loads(one.stdout.splitlines()[-1]) for one in done]
    full, second, third = (sum(step) for step in zip(*by_rank, strict=True))
    print(f"{name}, {shared}: {full / 1e6:.1f} MB, then {second / 1e6:.2f} and {third / 1e6:.2f} MB")
    assert third < full / 10
