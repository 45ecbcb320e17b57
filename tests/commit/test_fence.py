"""An opening of a directory that has begun to save fences those before it."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import datastates as ds
from datastates._base import faults
from datastates._base.faults import Fault
from datastates.cli.commands import main
from datastates.commit import fence, manifest
from datastates.commit.fence import DirectoryOpening
from datastates.commit.pending import Pending
from datastates.errors import FencedError, StorageError
from datastates.providers import HostTensorProvider

OPTIONS = {"host_cache": "2MiB", "block": "1MiB"}


def of_another_process(root: Path, name: str) -> DirectoryOpening:
    """An opening as another process would begin it."""
    return DirectoryOpening(root, fence._numbered(root, name), name)


def providers(value: float = 1.0) -> list[HostTensorProvider]:
    return [HostTensorProvider("model", {"a": np.full(10, value)})]


def test_who_opened_last_fences_when_it_begins_to_save(tmp_path: Path) -> None:
    older, newer = (of_another_process(tmp_path, name) for name in ("older", "newer"))
    older.begin_to_save()
    older.refuse_if_fenced()  # the newer one may only look
    newer.begin_to_save()
    newer.begin_to_save()
    with pytest.raises(FencedError, match=r"a newer run saves in .* host .* neither commits nor deletes"):
        older.refuse_if_fenced()


def test_the_order_is_that_of_the_openings_not_of_the_first_snapshots(tmp_path: Path) -> None:
    older, newer = (of_another_process(tmp_path, name) for name in ("older", "newer"))
    newer.begin_to_save()
    with pytest.raises(FencedError):
        older.begin_to_save()
    newer.refuse_if_fenced()


def test_openings_of_one_process_do_not_fence_each_other(tmp_path: Path) -> None:
    first, second = (ds.Checkpointer(tmp_path, **OPTIONS) for _ in range(2))
    for step, ckpt in enumerate((first, second, first, second), 1):
        ckpt.snapshot(providers(step), step=step).wait_committed()
    numbers = [manifest.open(tmp_path / f"step-{step:08}").sequence or 0 for step in range(1, 5)]
    assert numbers == sorted({*numbers})
    first.close()
    second.close()


def test_only_partial_directories_of_older_openings_get_another_name(tmp_path: Path) -> None:
    older, newer = (of_another_process(tmp_path, name) for name in ("older", "newer"))
    pending = {
        name: Pending(tmp_path / f"step-{step:08}", mark=mark).begin()
        for step, (name, mark) in enumerate({"older": older.mark, "newer": newer.mark, "no run's": b""}.items())
    }
    newer.begin_to_save()
    assert {name: one.directory.exists() for name, one in pending.items()} == {
        "older": False,
        "newer": True,
        "no run's": True,
    }
    for one in pending.values():
        one.close()


def test_a_number_is_not_given_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process is stopped after it has looked for the highest number, which is then given, and its file deleted."""
    real, seen = fence._records, []

    def records(root: Path) -> list[fence._Record]:
        seen.append(found := real(root))
        if len(seen) == 1:
            for name in ("one", "two", "three"):
                of_another_process(root, name)
        return found

    monkeypatch.setattr(fence, "_records", records)
    assert of_another_process(tmp_path, "late")._number == 4


def test_a_directory_that_is_left_holds_no_record(tmp_path: Path) -> None:
    for step in (1, 2):
        with ds.Checkpointer(tmp_path, **OPTIONS) as ckpt:
            ckpt.snapshot(providers(), step=step)
        assert [path.name for path in sorted(tmp_path.iterdir())] == [f"step-{n:08}" for n in range(1, step + 1)]


def test_records_stay_where_an_earlier_run_may_wake_again(tmp_path: Path) -> None:
    older = of_another_process(tmp_path, "older")
    with ds.Checkpointer(tmp_path, **OPTIONS) as ckpt:
        ckpt.snapshot(providers(), step=1)
    with pytest.raises(FencedError):
        older.begin_to_save()
    for _ in range(3):
        with ds.Checkpointer(tmp_path, **OPTIONS) as ckpt:
            ckpt.snapshot(providers(), step=2)
    assert len(list((tmp_path / fence.FOLDER).iterdir())) == 2  # they do not become more


def test_a_directory_that_cannot_be_written_is_opened_to_look(tmp_path: Path) -> None:
    with ds.Checkpointer(tmp_path, **OPTIONS) as ckpt:
        ckpt.snapshot(providers(3.0), step=3)
    state = {"a": np.zeros(10)}
    faults.arm(Fault("opening.mkdir", "fail", errno.EROFS))
    with ds.Checkpointer(tmp_path, **OPTIONS) as ckpt:
        restored = ckpt.restore([HostTensorProvider("model", state)])
        assert restored is not None
        assert (restored.step, state["a"][0]) == (3, 3.0)
        faults.arm(Fault("opening.mkdir", "fail", errno.EROFS))
        with pytest.raises(StorageError, match=r"mkdir .*openings"):
            ckpt.snapshot(providers(), step=4).wait_committed()
        ckpt.snapshot(providers(), step=5).wait_committed()
    faults.clear()
    assert ckpt.steps() == [3, 5]


@pytest.mark.parametrize("make", [Path.touch, lambda path: path.symlink_to("nowhere")], ids=["file", "loose link"])
def test_what_is_no_folder_in_its_place_is_an_error(make: Callable[[Path], object], tmp_path: Path) -> None:
    make(tmp_path / fence.FOLDER)
    with ds.Checkpointer(tmp_path, **OPTIONS) as ckpt:
        assert ckpt.restore(providers()) is None
        with pytest.raises(StorageError, match=r"openings: Not a directory"):
            ckpt.snapshot(providers(), step=1).wait_committed()


@pytest.mark.parametrize("point", ["mkdir", "open", "write", "sync", "sync_directory"])
def test_the_next_snapshot_begins_to_save_again(point: str, tmp_path: Path) -> None:
    with ds.Checkpointer(tmp_path, on_error="warn", **OPTIONS) as ckpt:
        (tmp_path / fence.FOLDER / "opened-1").rename(tmp_path / "opened-1")
        (tmp_path / fence.FOLDER).rmdir()
        faults.arm(Fault(f"opening.{point}", "fail", errno.EIO))
        with pytest.raises(StorageError):
            ckpt.snapshot(providers(), step=1).wait_committed()
        faults.clear()
        ckpt.snapshot(providers(), step=2).wait_committed()


def test_readers_and_the_list_pass_over_the_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ds.Checkpointer(tmp_path, **OPTIONS) as ckpt:
        ckpt.snapshot(providers(), step=1).wait_committed()
        assert (tmp_path / fence.FOLDER).is_dir()
        assert main(["ls", str(tmp_path)]) == 0
        assert fence.FOLDER not in capsys.readouterr().out
        assert list(ds.load(tmp_path)) == ["model"]


def test_a_record_that_was_cut_short_still_counts(tmp_path: Path) -> None:
    older, newer = (of_another_process(tmp_path, name) for name in ("older", "newer"))
    newer.begin_to_save()
    (tmp_path / fence.FOLDER / "saving-2").write_bytes(b"")
    with pytest.raises(FencedError, match="process unknown on host unknown"):
        older.begin_to_save()
