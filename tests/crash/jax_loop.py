"""A training loop of flax and optax: ``jax_loop.py DIRECTORY STEPS`` resumes from what it finds.

It makes a snapshot at every step, and donates its state to every step.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import datastates as ds
from datastates.providers import from_pytree


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: Any, *, rng: Any) -> Any:
        x = nn.relu(nn.Dense(64)(x))
        x = nn.Dropout(0.2, deterministic=False)(x, rng=rng)
        return nn.Dense(1)(x)


NET, OPTIMIZER = Net(), optax.adamw(1e-2)


@jax.jit
def begin() -> dict[str, Any]:
    params = NET.init(jax.random.key(0), jnp.ones((1, 8)), rng=jax.random.key(1))
    return {
        "params": params,
        "optimizer": OPTIMIZER.init(params),
        "rng": jax.random.key(2),
    }


@functools.partial(jax.jit, donate_argnums=(0, 1, 2))
def update(params: Any, optimizer: Any, rng: Any) -> Any:
    rng, data, dropout = jax.random.split(rng, 3)
    x = jax.random.normal(data, (16, 8))

    def loss_of(params: Any) -> Any:
        return jnp.mean((NET.apply(params, x, rng=dropout) - x.sum(1, keepdims=True)) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    updates, optimizer = OPTIMIZER.update(gradients, optimizer, params)
    return optax.apply_updates(params, updates), optimizer, rng, loss


def main(directory: str | Path, steps: int) -> tuple[int | None, dict[str, Any]]:
    """The step that it resumed from, and the state after all steps."""
    provider = from_pytree("state", {**begin(), "loss": 0.0})
    with ds.Checkpointer(directory, host_cache="16MiB", keep_last=2) as ckpt:
        restored = ckpt.restore([provider])
        resumed = None if restored is None else restored.step
        state = provider.tree
        for number in range(resumed or 0, steps):
            params, optimizer, rng, loss = update(state["params"], state["optimizer"], state["rng"])
            provider.tree = state = {"params": params, "optimizer": optimizer, "rng": rng, "loss": float(loss)}
            ckpt.snapshot([provider], step=number + 1)
    return resumed, state


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
