"""Arrays of JAX in GPU memory, by stand-ins whose memory is CuPy's: the machine of these tests has no JAX."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hold import GATE, held

import datastates as ds
from datastates.errors import ProviderError, TornSnapshotError
from datastates.executor.jobs import WriteJob
from datastates.state import arrays
from datastates.state.provider import StateProvider

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")


class Named(SimpleNamespace):
    """Attributes, with an identity of their own."""

    __hash__ = object.__hash__  # type: ignore[assignment]


class Array:
    """What is asked of a ``jax.Array`` on one GPU."""

    is_fully_addressable = True

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        self.shape, self.dtype, self.ndim = memory.shape, memory.dtype, memory.ndim
        self.gone = False
        device = Named(
            platform="gpu",
            process_index=0,
            local_hardware_id=memory.device.id,
            client=SimpleNamespace(platform_version="cuda 13000"),
        )
        whole = tuple(slice(None) for _ in self.shape)
        self.sharding = Named(
            memory_kind="device", device_set={device}, devices_indices_map=lambda shape: {device: whole}
        )
        self.format = SimpleNamespace(layout=SimpleNamespace(major_to_minor=tuple(range(self.ndim))))
        self.addressable_shards = [SimpleNamespace(index=whole, data=self)]
        self._device = device

    def devices(self) -> set[Any]:
        return {self._device}

    def is_deleted(self) -> bool:
        return self.gone

    def block_until_ready(self) -> None:
        cupy.cuda.get_current_stream().synchronize()

    def unsafe_buffer_pointer(self) -> int:
        return int(self.memory.data.ptr)

    def donate(self) -> None:
        """What a computation does that takes the memory over; it has not written yet."""
        self.gone = True


class State(StateProvider):
    def __init__(self, live: dict[str, Array]) -> None:
        super().__init__("s")
        self.live = live

    def shards(self) -> list[ds.Shard]:
        return [ds.array_shard(key, array) for key, array in self.live.items()]


@pytest.fixture
def jax(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of the module."""
    module = SimpleNamespace(
        Array=Array,
        ShapeDtypeStruct=type("ShapeDtypeStruct", (), {}),
        core=SimpleNamespace(Tracer=type("Tracer", (), {})),
        dtypes=SimpleNamespace(issubdtype=lambda dtype, of: False, prng_key=None),
        process_count=lambda: 1,
    )
    monkeypatch.setitem(sys.modules, "jax", module)  # type: ignore[arg-type]


def live() -> dict[str, Array]:
    return {key: Array(cupy.arange(1 << 20, dtype=cupy.float32) + n) for n, key in enumerate(("a", "b"))}


def test_arrays_on_a_gpu_are_captured_lazily_from_their_memory(jax: None, tmp_path: Path) -> None:
    state = State(live())
    shards = state.shards()
    assert [(s.kind, s.lazy, s.buffer and s.buffer.device) for s in shards] == [("jax", True, 0)] * 2
    assert [s.buffer and s.buffer.pointer for s in shards] == [a.memory.data.ptr for a in state.live.values()]
    assert all(arrays.kind_of(a) == "jax" for a in state.live.values())
    ds.snapshot([state], tmp_path / "c").wait_committed()
    found = ds.load(tmp_path / "c")["s"]
    assert all(np.array_equal(found[key], array.memory.get()) for key, array in state.live.items())


def test_a_donation_before_the_copy_fails_the_snapshot_by_key(jax: None, tmp_path: Path) -> None:
    state = State(live())
    with ds.Checkpointer(tmp_path) as ckpt:
        with held("capture"):
            snapshot = ckpt.snapshot([state], step=1)
            state.live["b"].donate()
        with pytest.raises(TornSnapshotError) as caught:
            snapshot.wait_committed()
        assert caught.value.keys == ["s/b"]
        assert ckpt.steps() == []
        with pytest.raises(ProviderError, match="'b' is an array of JAX that was donated"):
            ckpt.snapshot([state], step=2)


def test_the_gate_waits_for_the_copies_themselves(jax: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    updated = threading.Event()
    torn = WriteJob.torn

    def torn_once_updated(job: WriteJob) -> list[int]:
        """The background goes on from the captured job only when the arrays have been donated."""
        updated.wait(60)
        return torn(job)

    monkeypatch.setattr(WriteJob, "torn", torn_once_updated)
    state = State(live())
    before = {key: array.memory.get() for key, array in state.live.items()}
    with ds.Checkpointer(tmp_path) as ckpt, held("capture", until=GATE):
        ckpt.snapshot([state], step=1)
        ckpt.gate()
        for array in state.live.values():
            array.donate()
            array.memory.fill(-1)
        updated.set()
    found = ds.load(tmp_path)["s"]
    assert all(np.array_equal(found[key], values) for key, values in before.items())
