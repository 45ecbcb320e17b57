"""One rank that holds several parts of one tensor, as a process with several devices does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from given import Given

import datastates as ds
from datastates.cli import main
from datastates.commit.manifest import container_name
from datastates.container.file import open_container
from datastates.errors import FormatError, ProviderError
from datastates.providers import HostTensorProvider
from datastates.state.provider import StateProvider

WHOLE = np.arange(4096 * 6, dtype=np.float32).reshape(4096, 6)


class Boxes(StateProvider):
    """Boxes of one tensor, each in memory of its own, and a whole tensor beside it."""

    def __init__(self, boxes: list[tuple[slice, slice]], **change: Any) -> None:
        super().__init__("s")
        self.boxes = [(box, np.ascontiguousarray(WHOLE[box])) for box in boxes]
        self.change = change

    def shards(self) -> list[ds.Shard]:
        shards = [
            replace(ds.array_shard("w", part), global_shape=WHOLE.shape, offset=(rows.start or 0, columns.start or 0))
            for (rows, columns), part in self.boxes
        ]
        return [*shards[:-1], replace(shards[-1], **self.change), ds.array_shard("b", np.ones(3))]


COLUMNS = [(slice(None), slice(0, 2)), (slice(None), slice(2, 5)), (slice(None), slice(5, 6))]
ROWS = [(slice(0, 1000), slice(None)), (slice(1000, 4096), slice(None))]


@pytest.mark.parametrize("saved", [COLUMNS, ROWS], ids=["columns", "rows"])
def test_they_are_one_tensor(saved: list[tuple[slice, slice]], tmp_path: Path) -> None:
    ds.snapshot([Boxes(saved)], tmp_path / "c").wait_committed()
    assert np.array_equal(ds.load(tmp_path / "c")["s"]["w"], WHOLE)
    with ds.open(tmp_path / "c") as stored:
        assert list(stored) == ["s/w", "s/b"]
        assert len(stored) == 2
        assert np.array_equal(stored["s/w"], WHOLE)
        assert (stored.digest("s/w") is None) == (saved is COLUMNS)  # runs that short have none
    other = Boxes(ROWS if saved is COLUMNS else COLUMNS)
    for _, part in other.boxes:
        part[:] = 0
    result = ds.restore([other], tmp_path / "c")
    assert all(np.array_equal(part, WHOLE[box]) for box, part in other.boxes)
    assert result.read_nbytes <= 1.05 * result.needed_nbytes
    whole = {"w": np.zeros_like(WHOLE), "b": np.zeros(3)}
    ds.restore([HostTensorProvider("s", whole)], tmp_path / "c", verify="digest")
    assert np.array_equal(whole["w"], WHOLE)
    assert main(["verify", str(tmp_path / "c")]) == 0
    assert main(["inspect", str(tmp_path / "c")]) == 0


@pytest.mark.parametrize(
    ("boxes", "change", "said"),
    [
        ([*ROWS, (slice(4000, 4001), slice(1, 2))], {}, "parts that overlap"),
        (ROWS, {"global_shape": (5000, 6)}, "parts of tensors of different types or shapes"),
        ([*ROWS, (slice(None), slice(None))], {}, "two shards have the key 's/w'"),
    ],
)
def test_what_is_no_tensor_is_refused(boxes: Any, change: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ProviderError, match=said):
        ds.snapshot([Boxes(boxes, **change)], tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def test_where_one_part_is_lost_the_others_stay_as_they_are(tmp_path: Path) -> None:
    ds.snapshot([Boxes(ROWS[:1])], tmp_path / "c").wait_committed()
    live = Boxes(ROWS)
    for _, part in live.boxes:
        part[:] = -1
    result = ds.restore([live], tmp_path / "c", strict=False)
    assert result.missing_keys == ["s/w"]
    assert all((part == -1).all() for _, part in live.boxes)


def test_a_file_whose_parts_overlap_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    half = (slice(0, 2048), slice(None))
    monkeypatch.setattr("datastates.saving.collect.overlap", lambda parts: False)
    ds.snapshot([Boxes([half, half])], tmp_path / "c").wait_committed()  # as many elements as the tensor has
    with pytest.raises(FormatError, match="'s/w' has parts that overlap"):
        ds.load(tmp_path / "c")
    for path in (tmp_path / "c", tmp_path / "c" / container_name(0)):
        assert main(["verify", str(path)]) == 1
        assert f"s/w in {tmp_path / 'c' / container_name(0)} has parts that overlap" in capsys.readouterr().out


def test_files_whose_parts_overlap_are_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = Boxes([(slice(0, 2048), slice(None))]).shards()[0]
    ds.snapshot([Given([part])], tmp_path / "c").wait_committed()
    one = open_container(tmp_path / "c" / container_name(0))
    monkeypatch.setattr("datastates.formats.own.open_named", lambda named: [one, replace(one)])
    with pytest.raises(FormatError, match="'s/w' has parts that overlap"):
        ds.load(tmp_path / "c")
