"""Measure JAX's sharded trees next to Orbax: saves, training beside them, restores onto the same mesh and another."""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

import datastates as ds
import page_cache
import raw
from datastates.providers import from_pytree
from measure import Plan, Result, Sample, interleave, stopwatch
from peers.base import fsync_tree
from write import remove

DEVICES = 8
PERIOD = 4
"""Iterations of the loop behind a save."""
Tree = Any
jax.config.update("jax_num_cpu_devices", DEVICES)


class Trees(ABC):
    """One way to save and restore a tree of JAX arrays, in a folder of its own."""

    settings: str

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._numbers = itertools.count(1)

    @abstractmethod
    def save(self, tree: Tree) -> tuple[Path, Callable[[], object]]:
        """Begin to save, and return as early as the system can.

        Returns:
            Where the checkpoint will be, and a function that waits until all of it is on stable storage.
        """

    @abstractmethod
    def restore(self, path: Path, like: Tree) -> Tree:
        """Read the tree with the shardings of ``like``."""


class DataStates(Trees):
    settings = "Checkpointer, load(like=); host cache 512 MiB"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._checkpointer = ds.Checkpointer(directory, host_cache="512MiB")

    def save(self, tree: Tree) -> tuple[Path, Callable[[], object]]:
        snapshot = self._checkpointer.snapshot([from_pytree("state", tree)], step=next(self._numbers))
        return Path(snapshot.path), snapshot.wait_committed

    def restore(self, path: Path, like: Tree) -> Tree:
        return ds.load(path, like={"state": like}, host_cache="512MiB")["state"]


class Orbax(Trees):
    def __init__(self, directory: Path, *, ocdbt: bool) -> None:
        super().__init__(directory)
        self.settings = f"AsyncCheckpointer, use_ocdbt={ocdbt}, no compression; then fsync"
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_compression=False)
        self._checkpointer = ocp.AsyncCheckpointer(handler)

    def save(self, tree: Tree) -> tuple[Path, Callable[[], object]]:
        path = self.directory / str(next(self._numbers))
        self._checkpointer.save(path, args=ocp.args.PyTreeSave(tree))

        def finish() -> None:
            self._checkpointer.wait_until_finished()
            fsync_tree(path)

        return path, finish

    def restore(self, path: Path, like: Tree) -> Tree:
        how = ocp.checkpoint_utils.construct_restore_args(like)
        return self._checkpointer.restore(path, args=ocp.args.PyTreeRestore(item=like, restore_args=how))


class Training:
    """A network with Adam, sharded by rows over a mesh of eight devices. Each step makes new arrays."""

    def __init__(self, width: int, layers: int) -> None:
        devices = np.array(jax.devices("cpu")[:DEVICES])
        assert len(devices) == DEVICES
        self._rows = NamedSharding(jax.sharding.Mesh(devices, ("rows",)), PartitionSpec("rows"))
        grid = jax.sharding.Mesh(devices.reshape(4, 2), ("x", "y"))
        self._tiles = NamedSharding(grid, PartitionSpec("y", "x"))
        keys = jax.random.split(jax.random.key(0), layers)
        params = {f"layer{i}": jax.random.normal(key, (width, width)) / width for i, key in enumerate(keys)}
        optimizer = optax.adam(1e-3)
        self.state: Tree = self._on_rows({"params": params, "optimizer": optimizer.init(params)})
        self._batch = jnp.ones((1, width))

        @jax.jit
        def step(state: Tree, batch: jax.Array) -> Tree:
            def loss(params: Tree) -> jax.Array:
                return (functools.reduce(lambda x, w: jnp.tanh(x @ w), params.values(), batch) ** 2).sum()

            updates, moments = optimizer.update(jax.grad(loss)(state["params"]), state["optimizer"])
            return {"params": optax.apply_updates(state["params"], updates), "optimizer": moments}

        self._step = step
        self.iterate()

    def _on_rows(self, tree: Tree) -> Tree:
        return jax.tree.map(lambda x: jax.device_put(x, self._rows) if x.ndim else x, tree)

    def iterate(self) -> None:
        self.state = jax.block_until_ready(self._step(self.state, self._batch))

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in jax.tree.leaves(self.state))

    def like(self, *, tiles: bool) -> Tree:
        """Shapes and types of the state, on the mesh that it has or, in ``tiles``, on one of 4 × 2 devices."""

        def one(x: jax.Array) -> jax.ShapeDtypeStruct:
            sharding = (self._tiles if tiles else self._rows) if x.ndim else x.sharding
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        return jax.tree.map(one, self.state)


def run(directory: Path, plan: Plan, *, tiny: bool) -> Result:
    """Measure all systems, and raw writes and reads of as many bytes with O_DIRECT."""
    training = Training(*((64, 2) if tiny else (4096, 4)))
    systems: dict[str, Trees] = {
        "datastates": DataStates(directory / "datastates"),
        "Orbax": Orbax(directory / "orbax", ocdbt=False),
        "Orbax with OCDBT": Orbax(directory / "ocdbt", ocdbt=True),
    }
    file = raw.RawFiles((directory / "raw",), training.nbytes)
    modes = {operation: raw.best_mode(file, operation) for operation in ("write", "read")}
    result = Result(
        parameters={"bytes": training.nbytes, "period": PERIOD, "devices": DEVICES},
        settings={name: system.settings for name, system in systems.items()},
    )

    def read_raw() -> Sample:
        write = file.run("write", modes["write"])["seconds"]
        page_cache.drop(file.paths[0])
        read = file.run("read", modes["read"])["seconds"]
        return {"write": write, "read": read, "mesh": read}

    actions: dict[str, Callable[[], Sample]] = {"raw": read_raw}
    actions |= {name: partial(_measured, training, system) for name, system in systems.items()}
    interleave(result, actions, plan)
    file.remove()
    return result


def _measured(training: Training, system: Trees) -> Sample:
    with stopwatch() as whole:
        with stopwatch() as called:
            path, wait = system.save(training.state)
        wait()
    sample = {"write": whole["seconds"], "call": called["seconds"]}
    for figure, tiles in (("read", False), ("mesh", True)):
        page_cache.drop(path)
        like = training.like(tiles=tiles)
        with stopwatch() as taken:
            restored = jax.block_until_ready(system.restore(path, like))
        sample[figure] = taken["seconds"]
        _check(training.state, restored, like)
        del restored  # on a virtual machine, memory beyond what was in use before is slow to come
    remove(path)
    plain = [_seconds(training.iterate) for _ in range(PERIOD)]
    begin = time.perf_counter()
    path, wait = system.save(training.state)
    for _ in range(PERIOD):
        training.iterate()
    sample["lost"] = time.perf_counter() - begin - PERIOD * statistics.median(plain)
    wait()
    remove(path)
    return sample


def _check(state: Tree, restored: Tree, like: Tree) -> None:
    """Raise AssertionError unless the restored tree has the state's values and the wanted shardings."""

    def one(was: jax.Array, now: jax.Array, wanted: jax.ShapeDtypeStruct) -> None:
        if not np.array_equal(was, now) or not now.sharding.is_equivalent_to(wanted.sharding, now.ndim):
            raise AssertionError("the restore did not bring the tree back")

    jax.tree.map(one, state, restored, like)


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
