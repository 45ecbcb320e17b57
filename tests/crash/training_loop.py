"""A small training run whose state is a pure function of the step. The tests run it as a script and kill it.

Usage: ``training_loop.py DIRECTORY STEPS``. It restores the newest checkpoint, goes on from there, and prints each step
once it is committed.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import datastates as ds
from datastates.providers import HostTensorProvider, from_state_dict
from datastates.state.provider import StateProvider

OPTIONS: dict[str, Any] = {"host_cache": "2MiB", "block": "1MiB", "keep_last": 3}
"""The cache is smaller than the state, so that a snapshot is captured while it is written."""


def state_of(step: int) -> dict[str, dict[str, Any]]:
    random = np.random.default_rng(step)
    return {
        "lazy": {
            "weights": random.random(450_000),
            "mask": random.integers(0, 256, 70_001, np.uint8),
            "empty": np.zeros((0, 3)),
        },
        "eager": {
            "replay": random.random((100, 70), np.float32),
            "seen": [int(step), float(random.random()), {"name": f"step {step}", "order": random.permutation(50)}],
        },
    }


def update(state: dict[str, dict[str, Any]], step: int) -> None:
    new = state_of(step)
    for key, array in state["lazy"].items():
        array[...] = new["lazy"][key]
    state["eager"].update(new["eager"])


def providers_of(state: dict[str, dict[str, Any]]) -> list[StateProvider]:
    return [HostTensorProvider("lazy", state["lazy"], lazy=True), from_state_dict("eager", state["eager"])]


def differences(state: Any, step: int) -> list[str]:
    """Where a state differs from that of a step, to the bit."""
    return list(_differences("", state, state_of(step)))


def _differences(at: str, found: Any, expected: Any) -> list[str]:
    if type(found) is not type(expected):
        return [at]
    if isinstance(expected, np.ndarray):
        same = (found.dtype, found.shape, found.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())
        return [] if same else [at]
    if isinstance(expected, dict):
        if list(found) != list(expected):
            return [at]
        return [d for k in expected for d in _differences(f"{at}/{k}", found[k], expected[k])]
    if isinstance(expected, list):
        if len(found) != len(expected):
            return [at]
        return [
            d for i, (f, e) in enumerate(zip(found, expected, strict=True)) for d in _differences(f"{at}/{i}", f, e)
        ]
    return [] if found == expected else [at]


def main(directory: str, steps: int) -> None:
    state = state_of(0)
    providers = providers_of(state)
    with ds.Checkpointer(directory, **OPTIONS) as ckpt:
        print("running", flush=True)
        for _ in range(3):  # so that the fault points of reading are passed three times
            restored = ckpt.restore(providers)
        begin = restored.step if restored else 0
        if wrong := differences(state, begin):
            sys.exit(f"restored step {begin} is wrong at {wrong}")
        taken: list[ds.Snapshot] = []
        for step in range(begin + 1, begin + 1 + steps):
            with ckpt.gate():
                update(state, step)
            taken.append(ckpt.snapshot(providers, step=step))
            for snapshot in [s for s in taken if s.committed]:
                taken.remove(snapshot)
                print(snapshot.step, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
