"""What the scripts of processes of jax.distributed share: how they meet, save, restore and tell the test.

The environment has RANK, WORLD_SIZE and MASTER_PORT. The first argument is the directory of the checkpoints.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax_meshes
from jax._src import distributed
from split_state import Split

import datastates as ds
from datastates.errors import DatastatesError
from datastates.providers import HostTensorProvider, ReplicatedProvider, from_pytree

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
DIRECTORY = Path(sys.argv[1])
OPTIONS: dict[str, Any] = {"host_cache": "8MiB", "block": "1MiB", "on_error": "warn"}
SECONDS = 60
"""How long a process waits for another one."""


def start(**options: Any) -> Any:
    """Begin a run of all processes; returns the client of its coordination service."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize("127.0.0.1:" + os.environ["MASTER_PORT"], SIZE, RANK, **options)
    return distributed.global_state.client


def all_are_here(client: Any, name: str) -> None:
    """Wait until all processes have come."""
    client.wait_at_barrier(name, SECONDS * 1000)


def report(word: str, **what: Any) -> None:
    """Tell the test something, under a word."""
    print(json.dumps({"word": word, **what}), flush=True)


def state() -> Split:
    """This process's part of a state."""
    return Split.rows("model", {"w": (96, 40), "b": (33,)}, RANK, SIZE)


def outcome(of: Any) -> dict[str, Any]:
    """How long a call took, and the error that it raised."""
    begin = time.monotonic()
    told: dict[str, Any] = {"error": None}
    try:
        of()
    except DatastatesError as error:
        told = {"error": type(error).__name__, "text": str(error), "ranks": list(getattr(error, "ranks", ()))}
    return {"seconds": time.monotonic() - begin, **told}


def take(ckpt: ds.Checkpointer, step: int) -> ds.Snapshot:
    """Take a snapshot of a state that follows from the step, and of an array that all processes hold alike."""
    alike = ReplicatedProvider(HostTensorProvider("alike", {"rates": jax_meshes.RATES}))
    return ckpt.snapshot([state().fill(step), alike], step=step)


def save(ckpt: ds.Checkpointer, step: int) -> None:
    """Save a step, and tell what came of it."""
    report(f"save {step}", **outcome(lambda: take(ckpt, step).wait_committed()))


def restore(ckpt: ds.Checkpointer, word: str = "restore") -> None:
    """Restore the newest step, and tell which it is and what of it is wrong."""
    found = state()
    restored = ckpt.restore([found])
    assert restored is not None
    report(word, step=restored.step, wrong=found.wrong(restored.step))


def restore_mesh(shape: tuple[int, ...]) -> None:
    """Restore arrays onto another mesh, and tell how much was read."""
    provider = from_pytree("s", jax_meshes.described(shape))
    result = ds.restore([provider], DIRECTORY.with_name("mesh"), verify="digest")
    assert result is not None
    wrong = jax_meshes.wrong(provider.tree)
    sizes = {"needed": result.needed_nbytes, "read": result.read_nbytes, "shared": result.shared_nbytes}
    report("mesh", step=result.step, wrong=wrong, **sizes)


def restore_folder() -> None:
    """Restore a folder of safetensors, and tell how much was read."""
    provider = from_pytree("s", jax_meshes.described_folder())
    result = ds.restore([provider], DIRECTORY.with_name("folder"))
    assert result is not None
    wrong = jax_meshes.wrong(provider.tree, jax_meshes.FOLDER)
    alone = ds.load(DIRECTORY.with_name("folder"), like=jax_meshes.described_folder())
    wrong += jax_meshes.wrong(alone, jax_meshes.FOLDER)
    report("folder", wrong=wrong, needed=result.needed_nbytes, read=result.read_nbytes)
