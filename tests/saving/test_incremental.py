"""With ``incremental``, what has not changed is neither captured nor written, and each checkpoint stands alone."""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reflinks as emulated
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from whole_saves import a_state, as_two_ranks, assert_equal, assert_whole, copy_of, save

import datastates as ds
from datastates import _native
from datastates.config import Options
from datastates.errors import CommitError, DatastatesError, DeviceError, SettingsError, TornSnapshotError
from datastates.executor.executor import Executor
from datastates.providers import HostTensorProvider, ReplicatedProvider, from_state_dict
from datastates.saving import incremental
from datastates.storage.local_files import LocalWriter

torch = pytest.importorskip("torch")

CHUNK = 256 * 1024


@pytest.fixture(autouse=True)
def reflinks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Let files share ranges, as those of XFS do: whole blocks, or the rest of a file. Gives the ranges."""
    ranges: list[tuple[int, int]] = []
    monkeypatch.setattr(emulated, "ranges", ranges)
    monkeypatch.setattr(fcntl, "ioctl", emulated.clone)
    return ranges


def test_only_what_differs_is_written(tmp_path: Path) -> None:
    state, expected = a_state(), {}
    with ds.Checkpointer(tmp_path, incremental=True) as checkpointer:
        full = save(checkpointer, state, 0)
        expected[0] = copy_of(state)
        assert full["in_full"]
        assert not full["shared"]
        for step in (1, 2):
            state["large.2"][70_000] += 1  # in its second chunk
            state["count"] += 1
            part = save(checkpointer, state, step)
            expected[step] = copy_of(state)
            assert part["in_full"] == ""
            # that chunk, the last one of the array for the checksum that follows, and the small ones in the last pages
            assert part["bytes"] < 2 * CHUNK + 16 * 4096
            assert part["bytes"] + part["shared"] == full["bytes"]
        nothing = save(checkpointer, state, 3)
        expected[3] = copy_of(state)
        assert nothing["bytes"] < CHUNK + 16 * 4096
    assert_whole(tmp_path, expected)


def test_any_other_checkpoint_may_go_or_be_damaged(tmp_path: Path) -> None:
    state, expected = a_state(), {}
    with ds.Checkpointer(tmp_path, incremental=True, keep_last=2) as checkpointer:
        for step in range(6):
            state["large.0"] += 1
            save(checkpointer, state, step)
            expected[step] = copy_of(state)
    assert_whole(tmp_path, {step: expected[step] for step in (4, 5)})
    (first,) = tmp_path.glob("step-00000004*/rank-*.pt")
    first.write_bytes(b"damaged")
    assert_whole(tmp_path, {5: expected[5]})


def test_the_next_run_goes_on_from_what_it_has_restored(tmp_path: Path) -> None:
    state, expected = a_state(), {}
    for step in range(3):
        with ds.Checkpointer(tmp_path, incremental=True) as checkpointer:
            checkpointer.restore([from_state_dict("state", state)])
            state["large.1"][5] += 1
            assert (save(checkpointer, state, step)["in_full"] == "") == (step > 0)
        expected[step] = copy_of(state)
    with ds.Checkpointer(tmp_path, incremental=True) as checkpointer:
        assert save(checkpointer, state, 3)["in_full"], "nobody has looked at what is there"
    assert_whole(tmp_path, expected)


def test_damage_that_a_restore_has_found_goes_no_further(tmp_path: Path) -> None:
    state = a_state()
    with ds.Checkpointer(tmp_path, incremental=True) as checkpointer:
        save(checkpointer, state, 0)
        at_first = copy_of(state)
        for tensor in state.values():
            if isinstance(tensor, torch.Tensor):
                tensor += 1
        save(checkpointer, state, 1)
        (newest,) = tmp_path.glob("step-00000001*/rank-*.pt")
        with newest.open("r+b") as file:  # in what is frozen from now on
            file.seek(300_000)
            file.write(b"damaged")
        restored = checkpointer.restore([from_state_dict("state", state)], fallback=True)
        assert restored is not None
        assert restored.step == 0
        assert_equal(state, at_first)
        state["small.0"] += 1
        save(checkpointer, state, 2)
    assert_whole(tmp_path, {0: at_first, 2: state})


def test_a_change_that_no_counter_sees_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"large": torch.zeros(3_000_000), "other": torch.zeros(200_000)}
    share, begun = incremental._share, threading.Event()

    def late(*arguments: Any) -> bool:
        assert begun.wait(60)
        return share(*arguments)

    monkeypatch.setattr(incremental, "_share", late)
    with ds.Checkpointer(tmp_path, incremental=True, on_error="warn") as checkpointer:
        save(checkpointer, state, 0)
        state["large"][5] += 1
        snapshot = checkpointer.snapshot([from_state_dict("state", state)], step=1)
        state["large"].data[:100].fill_(7)  # no gate, and torch counts no change
        begun.set()
        with pytest.raises(TornSnapshotError, match=r"state/large"):
            snapshot.wait_committed()
        save(checkpointer, state, 2)
    assert_whole(tmp_path, {2: state})


class Late:
    """Hashes that are taken once an event is set: no worker was free before."""

    def __init__(self, begun: threading.Event, take: Callable[[], Any]) -> None:
        self._begun, self._take = begun, take
        self._job: Any = None

    def wait(self) -> None:
        assert self._begun.wait(60)
        self._job = self._take()
        self._job.wait()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._job, name)


def test_a_change_before_the_hashes_are_taken_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, begun = {"kept": torch.zeros(3_000_000), "large": torch.zeros(5_000_000)}, threading.Event()
    submit = Executor.submit_hash
    monkeypatch.setattr(Executor, "submit_hash", lambda *arguments: Late(begun, lambda: submit(*arguments)))
    with ds.Checkpointer(tmp_path, incremental=True, on_error="warn") as checkpointer:
        snapshot = checkpointer.snapshot([from_state_dict("state", state)], step=1)
        state["large"].data.fill_(7)  # no gate, and torch counts no change
        begun.set()
        with pytest.raises(TornSnapshotError, match=r"state/large") as found:
            snapshot.wait_committed()
        assert found.value.keys == ["state/large"]
        save(checkpointer, state, 2)
    assert_whole(tmp_path, {2: state})


class Failing:
    """A job whose device has failed."""

    def wait(self) -> None:
        raise DeviceError("the device has failed")

    wait_captured = wait

    def abort(self) -> None:
        pass


def test_where_nothing_can_be_hashed_the_snapshot_fails_and_not_the_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()
    monkeypatch.setattr(Executor, "submit_hash", lambda *arguments: Late(begun, Failing))
    monkeypatch.setattr(Executor, "submit_digests", lambda *arguments: Failing())
    updated = []

    def rank(number: int) -> None:
        state = {"kept": torch.zeros(5_000_000)}
        provider = ReplicatedProvider(from_state_dict("state", state))
        options: Options = {"rank": number, "world_size": 2, "incremental": True, "on_error": "warn"}
        with ds.Checkpointer(tmp_path, **options) as checkpointer:
            snapshot = checkpointer.snapshot([provider], step=1)
            begun.set()
            with checkpointer.gate():
                state["kept"] += 1
            with pytest.raises((DeviceError, CommitError), match="the device has failed"):
                snapshot.wait_committed()
            updated.append(number)

    as_two_ranks(rank)
    assert sorted(updated) == [0, 1]


def test_memory_that_is_gone_fails_the_snapshot_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, gone, begun = {"large": torch.zeros(40_000_000)}, torch.zeros(40_000_000), threading.Event()
    share = incremental._share

    def late(*arguments: Any) -> bool:
        assert begun.wait(60)
        return share(*arguments)

    monkeypatch.setattr(incremental, "_share", late)
    with ds.Checkpointer(tmp_path, incremental=True, on_error="warn") as checkpointer:
        save(checkpointer, {**state, "gone": gone}, 0)
        gone[5] = 1
        snapshot = checkpointer.snapshot([from_state_dict("state", {**state, "gone": gone})], step=1)
        gone.untyped_storage().resize_(0)
        begun.set()
        with pytest.raises(TornSnapshotError, match=r"state/gone"):
            snapshot.wait_committed()
        save(checkpointer, state, 2)
    assert_whole(tmp_path, {2: state})


def test_what_must_be_copied_in_the_call_is_no_more_than_the_host_cache(tmp_path: Path) -> None:
    buffer = np.zeros(9 << 20, np.uint8)
    with ds.Checkpointer(tmp_path, incremental=True, host_cache="16MiB", block="8MiB") as checkpointer:
        for step, nbytes in enumerate([9 << 20, 9 << 20, 17 << 20]):
            buffer = np.full(nbytes, step, np.uint8)
            snapshot = checkpointer.snapshot([HostTensorProvider("b", {"b": buffer})], step=step)
            snapshot.wait_committed()
            assert ("in_full" in snapshot.report.executor) == (step < 2)
    assert np.array_equal(ds.load(tmp_path, step=2)["b"]["b"], buffer)


def test_after_a_full_checkpoint_without_hashes_all_is_written_once(tmp_path: Path) -> None:
    state = a_state()
    with ds.Checkpointer(tmp_path) as checkpointer:
        assert "in_full" not in save(checkpointer, state, 0)
    with ds.Checkpointer(tmp_path, incremental=True) as checkpointer:
        assert save(checkpointer, state, 1)["in_full"] == "nothing with hashes was saved before"
        assert save(checkpointer, state, 2)["in_full"] == ""


def remove(file: Path) -> None:
    shutil.rmtree(file.parent)


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 5000)


def replace(file: Path) -> None:
    other = file.parent.parent / "other"
    ds.snapshot([from_state_dict("state", a_state(7))], other, step=3).wait_committed()
    assert (other / "rank-00000.pt").stat().st_size == pytest.approx(file.stat().st_size, abs=4096)
    (other / "rank-00000.pt").rename(file)
    shutil.rmtree(other)


@pytest.mark.parametrize("change", [remove, cut, replace])
@pytest.mark.parametrize("meanwhile", [False, True])
def test_a_base_that_is_not_as_it_was_written_is_not_shared(
    change: Callable[[Path], None], meanwhile: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = a_state()
    with ds.Checkpointer(tmp_path, incremental=True) as checkpointer:
        save(checkpointer, state, 0)
        (base,) = tmp_path.glob("step-*/rank-*.pt")
        share = LocalWriter.share

        def late(self: LocalWriter, *where: Any) -> bool:
            shared = share(self, *where)
            if base.exists() and not (tmp_path / "done").exists():
                (tmp_path / "done").touch()
                change(base)
            return shared

        if meanwhile:
            monkeypatch.setattr(LocalWriter, "share", late)
        else:
            change(base)
        state["large.1"][5] += 1
        state["large.3"][140_000] += 1
        assert "gone, or another one" in (found := save(checkpointer, state, 1)["in_full"]) or "does not share" in found
        expected = copy_of(state)
        state["large.1"][5] += 1
        assert save(checkpointer, state, 2)["in_full"] == ""
    assert_whole(tmp_path, {1: expected, 2: state})


def test_storage_that_refuses_two_saves_gets_whole_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, expected, asked = a_state(), {}, []
    with ds.Checkpointer(tmp_path, incremental=True) as checkpointer:
        for step in range(6):
            state["large.1"][5] += 1
            figures = save(checkpointer, state, step)
            expected[step] = copy_of(state)
            assert ("does not share" in figures["in_full"]) == (step in (1, 2))
            assert (figures["in_full"] == "") == (step > 3), "step 3 is the first one in two files"
            monkeypatch.setattr(LocalWriter, "share", lambda self, *where: bool(asked.append(where)))
    assert len(asked) == 2
    assert_whole(tmp_path, expected)


def test_each_so_many_checkpoints_one_is_full(tmp_path: Path) -> None:
    state = a_state()
    with ds.Checkpointer(tmp_path, incremental=True, full_every=3) as checkpointer:
        why = [save(checkpointer, state, step)["in_full"] for step in range(7)]
    assert [step for step, text in enumerate(why) if text] == [0, 3, 6]
    with pytest.raises(SettingsError, match="full_every: without incremental"):
        ds.Checkpointer(tmp_path, full_every=3)


def test_another_layout_is_written_in_full(tmp_path: Path) -> None:
    state, expected = a_state(), {}
    changes: list[Callable[[], object]] = [
        lambda: state.update({"large.0": torch.randn(400_000)}),
        lambda: state.pop("large.2"),
        lambda: state.update({"new": torch.randn(200_000)}),
        lambda: state.update({"large.1": state["large.1"].double()}),
    ]
    with ds.Checkpointer(tmp_path, incremental=True) as checkpointer:
        save(checkpointer, state, 0)
        for step, change in enumerate(changes, start=1):
            change()
            assert "lie elsewhere" in save(checkpointer, state, step)["in_full"]
            expected[step] = copy_of(state)
    assert_whole(tmp_path, expected)


def test_renamed_and_exchanged_arrays_are_what_they_are_now(tmp_path: Path) -> None:
    state = {"a": torch.randn(200_000), "b": torch.randn(200_000), "c": torch.randn(300, 1000)}
    with ds.Checkpointer(tmp_path, incremental=True) as checkpointer:
        save(checkpointer, state, 0)
        exchanged = {"a": state["b"], "b": state["a"], "c": state["c"]}
        save(checkpointer, exchanged, 1)
        renamed = {"x": state["b"], "y": state["a"], "z": state["c"]}
        assert save(checkpointer, renamed, 2)["in_full"] == ""
    assert_whole(tmp_path, {0: state, 1: exchanged, 2: renamed})


def test_eager_arrays_are_as_they_were_in_the_call(tmp_path: Path) -> None:
    buffer, weight = np.arange(300_000, dtype=np.float64), torch.randn(200_000)
    expected = {}
    with ds.Checkpointer(tmp_path, incremental=True) as checkpointer:
        for step in range(3):
            weight[3] += 1
            buffer[250_000:] += 1
            providers = [HostTensorProvider("replay", {"buffer": buffer}), from_state_dict("state", {"w": weight})]
            taken = checkpointer.snapshot(providers, step=step)
            expected[step] = buffer.copy(), weight.clone()
            buffer[:] -= 1  # as it may, once the call has returned
            taken.wait_committed()
            buffer[:] += 1
            assert (taken.report.executor["in_full"] == "") == (step > 0)
    for step, (then, weights) in expected.items():
        found = ds.load(tmp_path, step=step)
        assert np.array_equal(found["replay"]["buffer"], then)
        assert torch.equal(found["state"]["w"], weights)


def test_an_update_waits_until_it_is_known_what_to_capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, reached, go_on = a_state(), threading.Event(), threading.Event()
    share = incremental._share

    def held(*arguments: Any) -> bool:
        reached.set()
        assert go_on.wait(60)
        return share(*arguments)

    with ds.Checkpointer(tmp_path, incremental=True) as checkpointer:
        save(checkpointer, state, 0)
        monkeypatch.setattr(incremental, "_share", held)
        state["large.1"][5] += 1
        expected = copy_of(state)
        snapshot = checkpointer.snapshot([from_state_dict("state", state)], step=1)
        assert reached.wait(60)
        updated = threading.Event()

        def update() -> None:
            with checkpointer.gate():
                state["large.1"][5] += 1
                state["large.0"] += 1
            updated.set()

        threading.Thread(target=update).start()
        assert not updated.wait(0.1)
        go_on.set()
        assert updated.wait(60)
        snapshot.wait_committed()
        assert snapshot.report.executor["in_full"] == ""
    assert_whole(tmp_path, {1: expected})


@pytest.mark.parametrize("point", ["write", "sync", "open"])
def test_a_failure_leaves_nothing_and_the_next_goes_on(point: str, tmp_path: Path) -> None:
    state = a_state()
    with ds.Checkpointer(tmp_path, incremental=True, on_error="warn") as checkpointer:
        save(checkpointer, state, 0)
        state["large.1"][5] += 1
        _native.arm_fault(point, "fail", 28)
        with pytest.raises(DatastatesError):
            save(checkpointer, state, 1)
        _native.clear_faults()
        assert [path.name[:13] for path in tmp_path.glob("step-*")] == ["step-00000000"]
        state["large.2"][5] += 1
        save(checkpointer, state, 2)
        expected = copy_of(state)
    assert_whole(tmp_path, {2: expected})


def test_two_ranks_share_each_with_their_own(tmp_path: Path) -> None:
    whole = torch.randn(2, 200_000)
    reports: dict[tuple[int, int], dict[str, Any]] = {}
    replicated = torch.randn(300_000)

    def rank(number: int) -> None:
        options: Options = {"rank": number, "world_size": 2, "incremental": True}
        with ds.Checkpointer(tmp_path, **options) as checkpointer:
            for step in range(3):
                state = {"mine": whole[number] + step * torch.eye(1, 200_000)[0], "alike": replicated}
                provider = from_state_dict(f"state{number}", state)
                snapshot = checkpointer.snapshot([provider], step=step)
                snapshot.wait_committed()
                reports[number, step] = snapshot.report.executor

    as_two_ranks(rank)
    assert len(reports) == 6
    assert all((report["in_full"] == "") == (step > 0) for (_, step), report in reports.items())
    for step in range(3):
        found = ds.load(tmp_path, step=step)
        for number in range(2):
            expected = whole[number] + step * torch.eye(1, 200_000)[0]
            assert torch.equal(found[f"state{number}"]["mine"], expected)
            assert torch.equal(found[f"state{number}"]["alike"], replicated)


def test_what_ranks_hold_alike_is_compared_as_it_was_in_the_call(tmp_path: Path) -> None:
    frozen = torch.randn(900_000)
    why: dict[tuple[int, int], str] = {}

    def rank(number: int) -> None:
        alike = {"steps": np.zeros(50), "frozen": frozen, "weights": torch.zeros(100_000)}
        provider = ReplicatedProvider(from_state_dict("alike", alike))
        options: Options = {"rank": number, "world_size": 2, "incremental": True}
        with ds.Checkpointer(tmp_path, **options) as checkpointer:
            for step in range(3):
                alike["steps"][:] = alike["weights"][:] = step
                snapshot = checkpointer.snapshot([provider], step=step)
                alike["steps"][:] = -number  # it is no array that the snapshot waits for
                snapshot.wait_committed()
                why[number, step] = snapshot.report.executor["in_full"]

    as_two_ranks(rank)
    assert len(why) == 6
    holders = {number for (number, step), text in why.items() if step == 2 and text == ""}
    assert holders, why
    for step in range(3):
        found = ds.load(tmp_path, step=step)["alike"]
        assert torch.equal(found["frozen"], frozen)
        assert (found["steps"] == step).all()
        assert (found["weights"] == step).all()


KEYS = ["a", "b", "c", "d"]
CHANGES = st.one_of(
    st.tuples(st.just("one"), st.sampled_from(KEYS), st.integers(0, 199_999)),
    st.tuples(st.just("all"), st.sampled_from(KEYS), st.just(0)),
    st.tuples(st.just("resize"), st.sampled_from(KEYS), st.integers(1, 300_000)),
    st.tuples(st.just("drop"), st.sampled_from(KEYS), st.just(0)),
    st.tuples(st.just("back"), st.just(""), st.integers(0, 9)),
    st.tuples(st.just("delete"), st.just(""), st.integers(0, 9)),
    st.tuples(st.just("again"), st.just(""), st.just(0)),
)


@settings(max_examples=6, suppress_health_check=list(HealthCheck), deadline=None)
@given(st.lists(CHANGES, min_size=2, max_size=7))
def test_histories(tmp_path_factory: pytest.TempPathFactory, history: list[tuple[str, str, int]]) -> None:
    root = tmp_path_factory.mktemp("history")
    state = {key: torch.arange(200_000, dtype=torch.float32) + i for i, key in enumerate(KEYS)} | {"n": 0}
    expected: dict[int, dict[str, Any]] = {}
    checkpointer = ds.Checkpointer(root, incremental=True)
    for step, (change, key, number) in enumerate(history):
        tensor = state.get(key)
        if change == "resize" or (tensor is None and key):
            state[key] = torch.arange(number + 1, dtype=torch.float32)
        elif change == "one" and tensor is not None:
            tensor[number % len(tensor)] += 1
        elif change == "all" and tensor is not None:
            tensor += 1
        elif change == "drop":
            del state[key]
        elif change == "back" and number in expected:
            state = copy_of(expected[number])
        elif change == "delete" and number in expected:
            del expected[number]
            (path,) = root.glob(f"step-{number:08d}*")
            shutil.rmtree(path)
        elif change == "again":
            checkpointer.close()
            checkpointer = ds.Checkpointer(root, incremental=True)
            checkpointer.restore([from_state_dict("state", copy_of(state))], strict=False)
        state["n"] += 1
        save(checkpointer, state, step)
        expected[step] = copy_of(state)
    checkpointer.close()
    assert_whole(root, expected)
    shutil.rmtree(root)
