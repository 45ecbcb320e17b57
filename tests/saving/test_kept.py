"""Where files share no ranges, ``incremental`` links a container of what has not changed."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import datastates as ds
from datastates.commit import run as run_of_commits
from datastates.commit.directory_tier import DirectoryTier
from datastates.config import Options
from datastates.errors import StorageError
from datastates.formats import own
from datastates.providers import (
    HostTensorProvider,
    ReplicatedProvider,
    from_state_dict,
    from_stateful,
)
from datastates.state.shards import Buffer, Shard
from datastates.storage import Location
from datastates.storage.local import LocalStore

torch = pytest.importorskip("torch")
saves = pytest.importorskip("whole_saves")


pytestmark = pytest.mark.usefixtures("linking")


def test_what_has_not_changed_is_linked(tmp_path: Path) -> None:
    state, expected = saves.a_state(), {}
    reports = []
    with ds.Checkpointer(tmp_path, incremental=True) as checkpointer:
        for step in range(5):
            state["large.2"] += 1
            state["count"] += 1
            reports.append(saves.save(checkpointer, state, step))
            expected[step] = saves.copy_of(state)
    whole, changing = reports[0]["bytes"], state["large.2"].nbytes
    assert [bool(report["in_full"]) for report in reports] == [True, True, False, False, False]
    assert all(report["bytes"] < changing + 16384 for report in reports[2:])
    assert all(report["shared"] > whole - changing - 16384 for report in reports[2:])
    assert saves.links_in(tmp_path, 0) == {"rank-00000.pt": 1}
    assert saves.links_in(tmp_path, 4) == {"rank-00000.pt": 1, "rank-00000.kept.pt": 4}
    saves.assert_whole(tmp_path, expected)


def test_what_needs_no_gradient_is_kept_at_once(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"base": torch.nn.Linear(400, 400), "head": torch.nn.Linear(400, 3)})
    model["base"].requires_grad_(False)
    optimizer = torch.optim.AdamW(model["head"].parameters())
    state: list[ds.StateProvider] = [from_stateful("model", model), from_stateful("optim", optimizer)]
    with ds.Checkpointer(tmp_path, incremental=True) as checkpointer:
        for step in range(3):
            snapshot = checkpointer.snapshot(state, step=step)
            model["head"](model["base"](torch.randn(2, 400))).sum().backward()
            optimizer.step()  # its first step makes its state: the rest may change, what is kept does not
            snapshot.wait_committed()
            assert (snapshot.report.executor["in_full"] == "") == (step > 0)
    assert saves.links_in(tmp_path, 2) == {"rank-00000.pt": 1, "rank-00000.kept.pt": 3}
    found = torch.load(tmp_path / "step-00000002" / "rank-00000.kept.pt", weights_only=True)
    assert list(found["model"]) == ["base.weight"]
    assert torch.equal(found["model"]["base.weight"], model["base"].weight)


def test_any_other_checkpoint_may_go(tmp_path: Path) -> None:
    state, expected = saves.a_state(), {}
    with ds.Checkpointer(tmp_path, incremental=True, keep_last=2) as checkpointer:
        for step in range(6):
            state["large.0"] += 1
            saves.save(checkpointer, state, step)
            expected[step] = saves.copy_of(state)
    saves.assert_whole(tmp_path, {step: expected[step] for step in (4, 5)})
    shutil.rmtree(tmp_path / "step-00000004")
    saves.assert_whole(tmp_path, {5: expected[5]})
    assert saves.links_in(tmp_path, 5) == {"rank-00000.pt": 1, "rank-00000.kept.pt": 1}


def test_the_next_run_goes_on_from_what_it_has_restored(tmp_path: Path) -> None:
    state, expected = saves.a_state(), {}
    for step in range(5):
        with ds.Checkpointer(tmp_path, incremental=True) as checkpointer:
            checkpointer.restore([from_state_dict("state", state)])
            state["large.1"][5] += 1
            assert (saves.save(checkpointer, state, step)["in_full"] == "") == (step > 1)
        expected[step] = saves.copy_of(state)
    saves.assert_whole(tmp_path, expected)


def delete(file: Path) -> None:
    file.unlink()


def cut(file: Path) -> None:
    os.truncate(file, 100_000)


def replace(file: Path) -> None:
    file.unlink()
    file.write_bytes(b"another file" * 100)


@pytest.mark.parametrize("change", [delete, cut, replace])
def test_a_base_that_is_not_as_it_was_written_is_not_linked(change: Callable[[Path], None], tmp_path: Path) -> None:
    state = saves.a_state()
    with ds.Checkpointer(tmp_path, incremental=True) as checkpointer:
        for step in range(3):
            state["large.0"] += 1
            saves.save(checkpointer, state, step)
        change(tmp_path / "step-00000002" / "rank-00000.kept.pt")
        report = saves.save(checkpointer, state, 3)
        assert report["in_full"] == "the file of step 2 is gone, or another one"
        assert saves.save(checkpointer, state, 4)["in_full"] == ""
    saves.assert_whole(tmp_path, {3: state, 4: state})


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_storage_that_links_nothing_is_asked_twice(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked, whys = [], []

    def refuse(source: Path, target: Path) -> None:
        asked.append(target)
        raise OSError(number, os.strerror(number), str(target))

    state = saves.a_state()
    monkeypatch.setattr(os, "link", refuse)
    with ds.Checkpointer(tmp_path, incremental=True) as checkpointer:
        for step in range(6):
            state["large.0"] += 1
            whys.append(saves.save(checkpointer, state, step).get("in_full"))
    assert len(asked) == 2
    assert whys[2:4] == [f"the storage at {tmp_path} does not link files"] * 2
    assert whys[4:] == [None, None], "no hashes are taken any more"
    assert [r.getMessage() for r in caplog.records if "in full" in r.getMessage()] == [
        f"incremental: each checkpoint is written in full, as the storage at {tmp_path} does not link files"
    ]
    saves.assert_whole(tmp_path, {5: state})


@pytest.mark.parametrize("number", [errno.EMLINK, errno.ENOSPC, errno.EIO])
def test_a_file_that_cannot_be_linked_is_written_and_the_next_one_is_tried(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, state, whys = os.link, saves.a_state(), []

    def refuse(source: Path, target: Path) -> None:
        if "step-00000005" not in str(target):
            raise OSError(number, os.strerror(number), str(target))
        link(source, target)

    monkeypatch.setattr(os, "link", refuse)
    with ds.Checkpointer(tmp_path, incremental=True) as checkpointer:
        for step in range(6):
            state["large.0"] += 1
            whys.append(saves.save(checkpointer, state, step)["in_full"])
    assert all(os.strerror(number) in why for why in whys[2:5])
    assert whys[5] == ""
    saves.assert_whole(tmp_path, {5: state})


def test_each_so_many_checkpoints_one_is_full(tmp_path: Path) -> None:
    state = saves.a_state()
    with ds.Checkpointer(tmp_path, incremental=True, full_every=3) as checkpointer:
        reports = []
        for step in range(8):
            state["count"] += 1
            reports.append(saves.save(checkpointer, state, step)["in_full"])
    assert [bool(report) for report in reports] == [True, True, False, False, True, False, False, True]
    assert reports[4] == reports[7] == "full_every"
    saves.assert_whole(tmp_path, {7: state})


def test_what_thaws_is_written_and_what_freezes_is_kept(tmp_path: Path) -> None:
    state, expected, full = saves.a_state(), {}, []
    with ds.Checkpointer(tmp_path, incremental=True) as checkpointer:
        for step, moving in enumerate(["large.0"] * 3 + ["large.1"] * 4):
            state[moving] += 1
            full.append(bool(saves.save(checkpointer, state, step)["in_full"]))
            expected[step] = saves.copy_of(state)
    assert full == [True, True, False, True, False, False, False]
    saves.assert_whole(tmp_path, expected)


@pytest.mark.parametrize("ranks", [1, 2])
def test_two_ranks_keep_each_its_own(ranks: int, tmp_path: Path) -> None:
    whole, alike = torch.randn(2, 200_000), torch.randn(500_000)
    reports: dict[tuple[int, int], dict[str, Any]] = {}

    def rank(number: int) -> None:
        options: Options = {"rank": number, "world_size": 2, "incremental": True}
        own = {"frozen": whole[number].clone(), "moves": torch.zeros(30_000)}
        mine = from_state_dict(f"state{number}", own)
        shared = {"alike": alike.clone(), "moves": torch.zeros(40_000), "n": 0}
        with ds.Checkpointer(tmp_path, **options) as checkpointer:
            for step in range(4):
                shared["n"] = step
                own["moves"][:] = number + step
                shared["moves"][:] = step
                state = [mine, ReplicatedProvider(from_state_dict("shared", shared))]
                snapshot = checkpointer.snapshot(state, step=step)
                snapshot.wait_committed()
                reports[number, step] = snapshot.report.executor

    saves.as_two_ranks(rank)
    assert all((report["in_full"] == "") == (step > 1) for (_, step), report in reports.items())
    assert sorted(saves.links_in(tmp_path, 3)) == [f"rank-0000{n}.{kept}pt" for n in range(2) for kept in ("kept.", "")]
    for number in range(ranks):  # each as one that restores alone, or with another
        live = {f"state{n}": {"frozen": torch.zeros(200_000), "moves": torch.zeros(30_000)} for n in range(2)}
        live["shared"] = {"alike": torch.zeros(500_000), "moves": torch.zeros(40_000), "n": -1}
        with ds.Checkpointer(tmp_path, rank=0, world_size=1) as checkpointer:
            checkpointer.restore([from_state_dict(name, one) for name, one in live.items()])
        assert torch.equal(live[f"state{number}"]["frozen"], whole[number])
        assert (live[f"state{number}"]["moves"] == number + 3).all()
        assert torch.equal(live["shared"]["alike"], alike)
        assert live["shared"]["n"] == 3
    found = ds.load(tmp_path)
    assert torch.equal(found["shared"]["alike"], alike)
    assert torch.equal(found["state1"]["frozen"], whole[1])


def test_eager_arrays_are_as_they_were_in_the_call(tmp_path: Path) -> None:
    arrays = {"frozen": np.arange(100_000.0), "moves": np.zeros(50_000)}
    with ds.Checkpointer(tmp_path, incremental=True) as checkpointer:
        for step in range(4):
            arrays["moves"][:] = step
            snapshot = checkpointer.snapshot([from_state_dict("state", arrays)], step=step)
            arrays["moves"][:] = -1
            snapshot.wait_committed()
    assert snapshot.report.executor["in_full"] == ""
    found = ds.load(tmp_path)["state"]
    assert (found["moves"] == 3).all()
    assert np.array_equal(found["frozen"], arrays["frozen"])


@pytest.mark.parametrize("point", ["link", "sync_directory"])
def test_a_failure_leaves_nothing_and_the_next_goes_on(
    point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = saves.a_state()
    with ds.Checkpointer(tmp_path, incremental=True) as checkpointer:
        for step in range(2):
            state["large.0"] += 1
            saves.save(checkpointer, state, step)
        with monkeypatch.context() as patched:

            def fail(self: LocalStore, *arguments: object) -> None:
                raise StorageError(errno.EIO, point, str(arguments[0]))

            name = {"link": "lengths", "sync_directory": "sync_folder"}[point]
            patched.setattr(LocalStore, name, fail)
            with pytest.raises(StorageError):
                saves.save(checkpointer, state, 2)
        assert sorted(path.name for path in tmp_path.glob("*step*")) == ["step-00000000", "step-00000001"]
        assert saves.save(checkpointer, state, 3)["in_full"] == ""
    saves.assert_whole(tmp_path, {3: state})


KEYS = ["a", "b", "c", "d"]
CHANGES = st.one_of(
    st.tuples(st.just("one"), st.sampled_from(KEYS), st.integers(0, 99_999)),
    st.tuples(st.just("resize"), st.sampled_from(KEYS), st.integers(1, 150_000)),
    st.tuples(st.just("drop"), st.sampled_from(KEYS), st.just(0)),
    st.tuples(st.just("tie"), st.sampled_from(KEYS), st.integers(0, 3)),
    st.tuples(st.just("back"), st.just(""), st.integers(0, 9)),
    st.tuples(st.just("delete"), st.just(""), st.integers(0, 9)),
    st.tuples(st.just("again"), st.just(""), st.just(0)),
    st.tuples(st.just("nothing"), st.just(""), st.just(0)),
)


@settings(max_examples=6, suppress_health_check=list(HealthCheck), deadline=None)
@given(st.lists(CHANGES, min_size=3, max_size=9))
def test_histories(tmp_path_factory: pytest.TempPathFactory, history: list[tuple[str, str, int]]) -> None:
    root = tmp_path_factory.mktemp("history")
    state: dict[str, Any] = {key: torch.arange(100_000, dtype=torch.float32) + i for i, key in enumerate(KEYS)}
    state |= {"n": 0}
    expected: dict[int, dict[str, Any]] = {}
    checkpointer = ds.Checkpointer(root, incremental=True)
    for step, (change, key, number) in enumerate(history):
        tensor = state.get(key)
        if change == "resize" or (tensor is None and key):
            state[key] = torch.arange(number + 1, dtype=torch.float32)
        elif change == "one" and tensor is not None:
            tensor[number % len(tensor)] += 1
        elif change == "drop":
            del state[key]
        elif change == "tie" and KEYS[number] in state:
            state[key] = state[KEYS[number]]
        elif change == "back" and number in expected:
            state = saves.copy_of(expected[number])
        elif change == "delete" and number in expected:
            del expected[number]
            (path,) = root.glob(f"step-{number:08d}*")
            shutil.rmtree(path)
        elif change == "again":
            checkpointer.close()
            checkpointer = ds.Checkpointer(root, incremental=True)
            checkpointer.restore([from_state_dict("state", saves.copy_of(state))], strict=False)
        state["n"] += 1
        saves.save(checkpointer, state, step)
        expected[step] = saves.copy_of(state)
    checkpointer.close()
    saves.assert_whole(root, expected)
    shutil.rmtree(root)


def test_host_tensors(tmp_path: Path) -> None:
    state = {"frozen": np.arange(200_000.0), "moves": np.zeros(20_000)}
    provider = HostTensorProvider("state", state, lazy=True)
    with ds.Checkpointer(tmp_path, incremental=True) as checkpointer:
        for step in range(3):
            state["moves"][:] = step
            snapshot = checkpointer.snapshot([provider], step=step)
            snapshot.wait_committed()
    assert snapshot.report.executor["in_full"] == ""
    found = ds.load(tmp_path)["state"]
    assert all(np.array_equal(found[key], array) for key, array in state.items())


class Halved(ds.StateProvider):
    """One tensor in two flat parts."""

    def __init__(self, parts: list[np.ndarray[Any, Any]]) -> None:
        super().__init__("state")
        self._parts = parts

    def shards(self) -> list[Shard]:
        total, found = sum(map(len, self._parts)), []
        for number, part in enumerate(self._parts):
            begin = sum(map(len, self._parts[:number]))
            place = {"global_shape": (total,), "offset": None, "flat": (begin, begin + len(part))}
            buffer = Buffer(part.ctypes.data, part.nbytes)
            shard = Shard("t", "float64", "numpy", (len(part),), (1,), lazy=True, buffer=buffer, source=part, **place)
            found.append(shard)
        return found


def test_one_of_two_parts_of_a_tensor_is_kept(tmp_path: Path) -> None:
    parts = [np.arange(60_000.0), np.zeros(50_000)]
    with ds.Checkpointer(tmp_path, incremental=True) as checkpointer:
        for step in range(4):
            parts[1][:] = step
            snapshot = checkpointer.snapshot([Halved(parts)], step=step)
            snapshot.wait_committed()
            assert (snapshot.report.executor["in_full"] == "") == (step > 1)
    for step in range(4):
        with ds.open(tmp_path, step=step) as checkpoint:
            assert np.array_equal(checkpoint["state/t"], np.concatenate([parts[0], np.full(50_000, step)]))
    assert list(own.open(Location(tmp_path / "step-00000003")).verify(lambda nbytes: None)) == []


def test_what_is_read_from_another_place_is_no_base(tmp_path: Path) -> None:
    state = saves.a_state()
    first, second = tmp_path / "first", tmp_path / "second"
    with ds.Checkpointer(first, tiers=second, incremental=True) as checkpointer:
        for step in range(3):
            state["large.0"] += 1
            saves.save(checkpointer, state, step)
        checkpointer.wait_drained()
    kept = first / "step-00000002" / "rank-00000.kept.pt"
    data = bytearray(kept.read_bytes())
    data[len(data) // 2] ^= 1
    kept.write_bytes(data)
    with ds.Checkpointer(first, tiers=second, incremental=True) as checkpointer:
        checkpointer.restore([from_state_dict("state", state)])
        state["large.0"] += 1
        assert saves.save(checkpointer, state, 3)["in_full"] == "nothing with hashes was saved before"
    saves.assert_whole(first, {3: state})


def test_where_a_link_seems_to_be_there_already_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def answered_twice(source: Path, target: Path) -> None:
        link(source, target)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))

    state = saves.a_state()
    monkeypatch.setattr(os, "link", answered_twice)
    with ds.Checkpointer(tmp_path, incremental=True) as checkpointer:
        for step in range(3):
            state["large.0"] += 1
            report = saves.save(checkpointer, state, step)
    assert report["in_full"] == ""
    saves.assert_whole(tmp_path, {2: state})


def test_a_symbolic_link_is_no_base(tmp_path: Path) -> None:
    state = saves.a_state()
    with ds.Checkpointer(tmp_path / "run", incremental=True) as checkpointer:
        for step in range(2):
            state["large.0"] += 1
            saves.save(checkpointer, state, step)
        kept = tmp_path / "run" / "step-00000001" / "rank-00000.kept.pt"
        kept.rename(tmp_path / "moved")
        kept.symlink_to(tmp_path / "moved")
        state["large.0"] += 1
        assert saves.save(checkpointer, state, 2)["in_full"]
    (tmp_path / "moved").unlink()
    saves.assert_whole(tmp_path / "run", {2: state})


def test_what_is_linked_takes_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = saves.a_state()
    monkeypatch.setattr(DirectoryTier, "in_memory", True)
    with ds.Checkpointer(tmp_path, incremental=True) as checkpointer:
        for step in range(2):
            state["large.0"] += 1
            saves.save(checkpointer, state, step)
        monkeypatch.setattr(run_of_commits, "host_memory", lambda: 1_000_000)
        state["large.0"] += 1
        assert saves.save(checkpointer, state, 2)["in_full"] == ""
        expected = saves.copy_of(state)
        state["large.1"] += 1
        with pytest.raises(StorageError, match="free for it"):
            saves.save(checkpointer, state, 3)
    saves.assert_whole(tmp_path, {2: expected})


def test_who_saves_parts_alone_keeps_nothing(tmp_path: Path) -> None:
    parts = [np.arange(60_000.0)]

    class Half(Halved):
        def shards(self) -> list[Shard]:
            return [dataclasses.replace(one, global_shape=(120_000,)) for one in super().shards()]

    with ds.Checkpointer(tmp_path, rank=0, world_size=1, incremental=True) as checkpointer:
        for step in range(3):
            snapshot = checkpointer.snapshot([Half(parts)], step=step)
            snapshot.wait_committed()
    assert snapshot.report.executor["in_full"] == "this rank saves parts of tensors alone"


def test_a_link_that_cannot_be_synced_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, fsync = saves.a_state(), os.fsync

    def fail(fd: Any) -> None:
        if "kept" in os.readlink(f"/proc/self/fd/{fd if isinstance(fd, int) else fd.fileno()}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(fd)

    with ds.Checkpointer(tmp_path, incremental=True) as checkpointer:
        for step in range(2):
            state["large.0"] += 1
            saves.save(checkpointer, state, step)
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", fail)
            state["large.0"] += 1
            assert os.strerror(errno.EIO) in saves.save(checkpointer, state, 2)["in_full"]
    saves.assert_whole(tmp_path, {2: state})


def test_what_was_restored_in_part_is_no_base(tmp_path: Path) -> None:
    state, kept = saves.kept_at_step_2(tmp_path)
    data = bytearray(kept.read_bytes())
    data[len(data) // 2] ^= 1
    kept.write_bytes(data)
    with ds.Checkpointer(tmp_path, incremental=True) as checkpointer:
        checkpointer.restore([from_state_dict("state", state)], keys=["state/large.0"])
        state["large.0"] += 1
        assert saves.save(checkpointer, state, 3)["in_full"] == "nothing with hashes was saved before"
    saves.assert_whole(tmp_path, {3: state})


def test_links_that_always_lead_elsewhere_are_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(target))

    state = saves.a_state()
    monkeypatch.setattr(os, "link", refuse)
    with ds.Checkpointer(tmp_path, incremental=True) as checkpointer:
        for step in range(5):
            state["large.0"] += 1
            saves.save(checkpointer, state, step)
    assert len([line for line in caplog.messages if "each checkpoint is written in full" in line]) == 1
