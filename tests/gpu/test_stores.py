"""State on a GPU goes up to a store and comes back, while training goes on."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from memory_store import MemoryStore

import datastates as ds
from datastates.errors import StorageError
from datastates.providers import from_stateful
from datastates.storage import Location, Traits, register, stores
from datastates.testing import equal

ROOT = "mem://bucket/run"


class Pieces(MemoryStore):
    traits = Traits(best_piece=1 << 20)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    monkeypatch.setattr(stores, "KINDS", dict(stores.KINDS))
    register("mem", made := Pieces())
    return made


@pytest.mark.parametrize("host_cache", ["2MiB", "4MiB", "64MiB"])
@pytest.mark.parametrize("device_cache", ["0", "1GiB"])
def test_training_goes_on_while_it_goes_up(store: MemoryStore, host_cache: str, device_cache: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1000, 3000), torch.nn.Linear(3000, 1000)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    providers = [from_stateful("model", model), from_stateful("optimizer", optimizer)]
    expected = []
    options = {"host_cache": host_cache, "block": "1MiB", "device_cache": device_cache}
    with ds.Checkpointer(ROOT, **options) as checkpointer:
        for step in range(4):
            model(torch.randn(64, 1000, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            expected.append(copy.deepcopy((model.state_dict(), optimizer.state_dict())))
            checkpointer.snapshot(providers, step=step)
        checkpointer.wait()
        for step in (1, 3):
            assert checkpointer.restore(providers, step=step) is not None
            assert equal(dict(model.state_dict()), dict(expected[step][0]))
            assert equal(optimizer.state_dict(), expected[step][1])
    (name,) = (n for n in store.entries(Location(ROOT), deep=True) if n.startswith("step-00000002") and ".pt" in n)
    stock = torch.load(io.BytesIO(store.read_all(Location(ROOT) / name)))
    assert equal(dict(stock["model"]), {key: value.cpu() for key, value in expected[2][0].items()})


def test_a_store_that_fails_leaves_the_gpu_free(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.ones(8_000_000, device="cuda")
    provider = from_stateful("m", module := torch.nn.Module())
    module.register_buffer("t", tensor)

    def fail(self: MemoryStore, path: Location, pieces: object, nbytes: int) -> None:
        raise StorageError(5, "write", str(path))

    with ds.Checkpointer(ROOT, host_cache="2MiB", block="1MiB", on_error="warn") as checkpointer:
        with monkeypatch.context() as failing:
            failing.setattr(Pieces, "upload", fail)
            taken = checkpointer.snapshot([provider], step=1)
            with pytest.raises(StorageError, match="Input/output error"):
                taken.wait_committed()
            tensor.fill_(2)
            checkpointer.wait()
        checkpointer.snapshot([provider], step=2).wait_committed()
    assert equal(ds.load(ROOT)["m"]["t"], torch.full((8_000_000,), 2.0))
