"""States to checkpoint: nested containers of tensors and Python objects, and how to walk and fill them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

State = dict[str, Any]
"""Nested containers by name, or objects with ``state_dict`` and ``load_state_dict``."""


def plain(state: State) -> State:
    """The state with every object replaced by its ``state_dict``: live tensors, and mappings as plain dicts."""

    def dicts(value: Any) -> Any:
        # a stager of DCP in torch 2.11 cannot copy the ordered dicts of modules
        return {k: dicts(v) for k, v in value.items()} if isinstance(value, dict) else value

    return {name: dicts(value.state_dict()) if hasattr(value, "state_dict") else value for name, value in state.items()}


def tensors(value: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of nested containers, with its path joined by dots."""
    if isinstance(value, torch.Tensor):
        yield prefix, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from tensors(inner, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, (list, tuple)):
        for i, inner in enumerate(value):
            yield from tensors(inner, f"{prefix}.{i}")


def nbytes(state: State) -> int:
    """Bytes of all tensors."""
    return sum(t.nbytes for _, t in tensors(plain(state)))


def assign(live: Any, loaded: Any) -> Any:
    """Copy loaded tensors into the live ones, and replace other values; returns what the parent must hold."""
    if isinstance(live, torch.Tensor):
        if live is not loaded:
            live.detach().copy_(loaded)
        return live
    if isinstance(live, dict):
        for key in live:
            live[key] = assign(live[key], loaded[key])
        return live
    if isinstance(live, list):
        live[:] = [assign(a, b) for a, b in zip(live, loaded, strict=True)]
        return live
    return loaded


class Probe:
    """Checks that a restore works: wipes a few tensors before it, and compares them after it."""

    def __init__(self, state: State) -> None:
        found = [t.detach() for _, t in tensors(plain(state))]
        self._tensors = found[:: max(1, len(found) // 16)]
        self._values = [t.clone() for t in self._tensors]

    def wipe(self) -> None:
        """Set the chosen tensors to zero."""
        for tensor in self._tensors:
            tensor.zero_()

    def check(self) -> None:
        """Raise AssertionError unless the chosen tensors have their first values again."""
        if not all(map(torch.equal, self._tensors, self._values)):
            raise AssertionError("the restore did not bring the values back")


def llm_like(*, tiny: bool) -> State:
    """Host state as training an LLM leaves it: bf16 weights, fp32 master and moments, steps, and Python objects.

    It takes 1.6 GB in about 5,300 tensors, most of them small. A tiny one takes 4 MB in about 700.
    """
    layers, width, small = (8, 1024, 128) if not tiny else (2, 128, 64)
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (9 * width, width)}
    for layer in range(layers):
        for name, shape in {
            "attention.qkv": (3 * width, width),
            "attention.out": (width, width),
            "mlp.up": (4 * width, width),
            "mlp.down": (width, 4 * width),
        }.items():
            shapes[f"layers.{layer}.{name}.weight"] = shape
        for i in range(small):
            shapes[f"layers.{layer}.vectors.{i}"] = (width // 2 << i % 3,)
    generator = torch.Generator().manual_seed(0)

    def random(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype).uniform_(-1, 1, generator=generator)

    return {
        "model": {name: random(shape, torch.bfloat16) for name, shape in shapes.items()},
        "optimizer": {
            "state": {
                i: {
                    "step": torch.tensor(1000.0),
                    **{part: random(shape, torch.float32) for part in ("master", "exp_avg", "exp_avg_sq")},
                }
                for i, shape in enumerate(shapes.values())
            },
            "param_groups": [{"lr": 3e-4, "betas": [0.9, 0.95], "params": list(range(len(shapes)))}],
        },
        "loop": {"epoch": 3, "step": 1000, "losses": [1 / (i + 1) for i in range(100)], "run": "benchmark"},
    }


def many_small(count: int, elements: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """``count`` fp32 tensors of ``elements`` elements each, every one with its own memory."""
    return {f"layers.{i // 10}.part.{i % 10}": torch.full((elements,), float(i), device=device) for i in range(count)}
