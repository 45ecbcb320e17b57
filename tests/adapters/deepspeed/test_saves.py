"""The files of several ranks get their names together: all ranks hear of a failure, and no failure is silent."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from datastates import _native
from datastates._base import faults
from datastates.config import IoSettings
from datastates.errors import CommitError, FormatError, StorageError
from datastates.executor.make import make_executor
from datastates.files.hidden import HiddenFile
from datastates.ranks.board_world import BoardWorld
from datastates.ranks.store_board import StoreBoard
from datastates.ranks.torch_keys import TorchKeys
from datastates.ranks.world import SoloWorld
from datastates.saving import snapshot as snapshots
from datastates.saving.engine import Engine
from datastates.storage.local import LocalStore

saves = pytest.importorskip("datastates.adapters.deepspeed.save")
checkpoint_engine = pytest.importorskip("datastates.adapters.deepspeed.checkpoint_engine")
RANKS = 3
Give = Callable[[Any, Path, float], None]


@pytest.fixture
def worlds() -> Iterator[list[BoardWorld]]:
    store = dist.HashStore()
    made = [
        BoardWorld(r, RANKS, StoreBoard(TorchKeys(store, r, silence=5), "deepspeed/1"), timeout=5) for r in range(RANKS)
    ]
    yield made
    for world in reversed(made):
        world.close()


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine(make_executor(IoSettings(host_cache="8MiB", block="1MiB")), SoloWorld(), threads=8, auto_gate=False)
    yield made
    made.close()


@pytest.fixture
def give(engine: Engine, write_file: Any) -> Give:
    """Add a file to a save, with a tensor of that value."""

    def add(save: Any, final: Path, value: float) -> None:
        final.parent.mkdir(exist_ok=True)
        file = HiddenFile(final)
        file.begin()
        content = {"a": torch.full((5,), value)}
        save.add(write_file(file.written, content, engine=engine, attempt=save.attempt), file)

    return add


def run(
    worlds: list[BoardWorld], give: Give, folder: Path, name: str, tag: Callable[[int], str], value: float
) -> list[BaseException | None]:
    """Save a file on each rank; returns the failures."""

    def one(world: BoardWorld) -> BaseException | None:
        save = saves.Save(name, tag(world.rank), world, folder, latest=True)
        give(save, folder / save.tag / f"rank-{world.rank}.pt", value)
        save.end()
        failure: BaseException | None = save.undelivered()
        return failure

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(one, worlds))


def names(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


ALL = ["latest", *(f"tag/rank-{rank}.pt" for rank in range(RANKS))]


def test_all_get_their_names_together(worlds: list[BoardWorld], give: Give, tmp_path: Path) -> None:
    for number in range(2):  # the second replaces the first
        assert run(worlds, give, tmp_path, f"save/{number}", lambda _: "tag", number) == [None] * RANKS
        assert names(tmp_path) == ALL
        assert (tmp_path / "latest").read_text() == "tag"
        for rank in range(RANKS):
            assert torch.load(tmp_path / "tag" / f"rank-{rank}.pt")["a"].tolist() == [number] * 5


def test_ranks_may_have_tags_of_their_own(worlds: list[BoardWorld], give: Give, tmp_path: Path) -> None:
    assert run(worlds, give, tmp_path, "save/0", lambda rank: f"tag-{rank // 2}", 1) == [None] * RANKS
    assert names(tmp_path) == ["latest", "tag-0/rank-0.pt", "tag-0/rank-1.pt", "tag-1/rank-2.pt"]
    assert (tmp_path / "latest").read_text() == "tag-0"  # as DeepSpeed, which lets rank 0 write it


@pytest.mark.parametrize("operation", ["rename", "sync_directory"])
def test_an_error_at_the_end_is_told_with_its_number(
    worlds: list[BoardWorld], give: Give, tmp_path: Path, operation: str
) -> None:
    faults.arm(faults.parse(f"store.{operation}=fail:{errno.ENOSPC}")[0])
    failures = run(worlds, give, tmp_path, "save/0", lambda _: "tag", 1)
    own = [f for f in failures if isinstance(f, StorageError)]
    assert [f.errno for f in own] == [errno.ENOSPC]
    others = [f for f in failures if f is not own[0]]
    assert all(type(f) is CommitError and "No space left on device" in str(f) for f in others)
    assert not (tmp_path / "latest").exists()


def test_what_replaces_is_kept_when_the_old_is_gone(worlds: list[BoardWorld], give: Give, tmp_path: Path) -> None:
    run(worlds, give, tmp_path, "save/0", lambda _: "tag", 1)
    faults.arm(faults.parse(f"store.rename=fail:{errno.EIO}")[0])
    assert None not in run(worlds, give, tmp_path, "save/1", lambda _: "tag", 2)
    found = [torch.load(path)["a"][0].item() for path in (tmp_path / "tag").rglob("*.pt")]
    assert found == [2.0] * RANKS
    assert any(".partial-" in name for name in names(tmp_path))


def test_every_file_that_failed_is_told(give: Give, tmp_path: Path) -> None:
    save = saves.Save("save/0", "tag", SoloWorld())
    _native.arm_fault("write", "fail", errno.ENOSPC)
    try:
        give(save, tmp_path / "tag" / "a.pt", 1)
        give(save, tmp_path / "tag" / "b.pt", 1)
        save.end()
    finally:
        _native.clear_faults()
    assert isinstance(save.undelivered(), StorageError)
    assert save.undelivered() is None
    assert not snapshots._silent.intersection(save.snapshots.values())
    assert names(tmp_path) == []


def test_folders_that_cannot_be_listed_hold_no_debris(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left = HiddenFile(tmp_path / "tag" / "a.pt").begin()
    left.close()
    listdir = os.listdir

    def refuse(path: Path) -> list[str]:
        if Path(path).name == "lost+found":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return listdir(path)

    monkeypatch.setattr(os, "listdir", refuse)
    (tmp_path / "lost+found").mkdir()
    saves.sweep(tmp_path)
    assert not os.path.exists(left.directory)
    assert caplog.messages == [f"removing the debris of an interrupted run: {left.directory}"]


@pytest.mark.long
def test_what_any_run_is_writing_is_no_debris(give: Give, tmp_path: Path) -> None:
    """This holds for another process, too: its lock says so, not a list in this process."""
    save = saves.Save("save/0", "tag", SoloWorld(), tmp_path, latest=True)
    give(save, tmp_path / "tag" / "a.pt", 1)
    imported = "import pathlib, sys; from datastates.adapters.deepspeed.save import sweep"
    code = f"{imported}; sweep(pathlib.Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=120)
    save.end()
    assert save.undelivered() is None
    assert names(tmp_path) == ["latest", "tag/a.pt"]


def test_latest_is_no_debris_while_it_is_written(give: Give, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create, beside = LocalStore.create, []

    def create_beside_another_run(store: LocalStore, path: Path, data: bytes) -> None:
        create(store, path, data)
        saves.sweep(tmp_path)
        beside.extend(os.listdir(tmp_path))

    monkeypatch.setattr(LocalStore, "create", create_beside_another_run)
    save = saves.Save("save/0", "tag", SoloWorld(), tmp_path, latest=True)
    give(save, tmp_path / "tag" / "a.pt", 1)
    save.end()
    assert save.undelivered() is None
    assert (tmp_path / "latest").read_text() == "tag"
    assert beside == ["tag"], "who counts folders takes it for a checkpoint"


def test_a_file_with_a_damaged_index_is_not_taken_for_anothers(give: Give, tmp_path: Path) -> None:
    from datastates.files import torch_loads
    from datastates.formats import own

    save = saves.Save("save/0", "tag", SoloWorld())
    file = tmp_path / "tag" / "a.pt"
    give(save, file, 1)
    save.end()
    assert own.has_ending(file)
    good = file.read_bytes()
    for at in (good.rindex(b"datastates/"), good.index(b"chunk_crc"), len(good) - 2):
        file.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        assert own.has_ending(file)
        with pytest.raises(FormatError):
            torch_loads.load(file, IoSettings(), None, "all")
    torch.save({"a": torch.zeros(5)}, file)
    assert not own.has_ending(file)


def test_a_save_that_an_interrupted_call_has_sealed_is_not_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SimpleNamespace(datastates_config=SimpleNamespace(config={"host_cache_size": 0.03}))
    engine = checkpoint_engine.CheckpointEngine(config, 0)
    engine.create("tag")
    engine.save({"w": torch.ones(5)}, str(tmp_path / "a.pt"))
    put = engine._files.put

    def interrupted(save: Any) -> None:
        put(save)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(engine._files, "put", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.seal()
    engine.seal(CommitError("the call was interrupted"))
    engine.close()
    assert torch.load(tmp_path / "a.pt")["w"].tolist() == [1] * 5
