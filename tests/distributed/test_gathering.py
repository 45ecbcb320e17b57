"""What a restore needs from other hosts' directories is brought to the host that needs it, whole and compared."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from per_host_job import RANKS, SHAPES, host_of, names, restore, save
from split_state import Split

from datastates.commit import gathering, manifest
from datastates.commit.gathering import ElsewhereError, Gathering
from datastates.container.file import read_index
from datastates.errors import CorruptError, FormatError, RestoreError
from datastates.reading.head import Head
from datastates.reading.stored import Stored
from datastates.storage import Location

pytestmark = pytest.mark.usefixtures("links")
EVERY = [f"rank-0000{rank}.pt" for rank in range(RANKS)]


def files(tmp_path: Path, host: str, step: int) -> list[str]:
    return names(tmp_path / host / "run" / f"step-0000000{step}")[2:]


def flip(file: Path, at: int = 2000) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


@pytest.fixture
def brought(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """The transfers of each rank: container, sender and receiver."""
    carried: list[tuple[int, int, int]] = []
    carry = Gathering._carry

    def noted(self: Gathering, path: Location, one: Any, name: str) -> None:
        carried.append((one.container, one.sender, one.receiver))
        carry(self, path, one, name)

    monkeypatch.setattr(Gathering, "_carry", noted)
    return carried


def source(ckpt: Any, state: Any, rank: int) -> dict[str, int]:
    result = ckpt.restore(state)
    assert not state[0].wrong(result.step)
    return dict(result.source)


def test_ranks_that_have_moved_get_what_they_need(job: Any, tmp_path: Path, brought: Any) -> None:
    job(save(1))
    told = job(source, lambda rank: "ba"[rank // 2])
    here = socket.gethostname()
    assert [[*one] for one in told] == [[f"{here}:{tmp_path}/{host_of(rank)}/run"] for rank in range(RANKS)]
    assert sorted(brought) == sorted(2 * [(0, 2, 0), (1, 3, 1), (2, 0, 2), (3, 1, 3)])
    assert files(tmp_path, "a", 1) == files(tmp_path, "b", 1) == EVERY
    brought.clear()
    assert [[*one] for one in job(source)] == [[f"{tmp_path}/{host_of(rank)}/run"] for rank in range(RANKS)]
    assert not brought


def test_another_number_of_hosts(job: Any, tmp_path: Path) -> None:
    job(save(1, 2))
    assert job(restore, lambda rank: "cab"[rank], 3) == [2] * 3
    assert names(tmp_path / "c" / "run") == ["step-00000001", "step-00000002"]
    assert files(tmp_path, "c", 2) == EVERY[:2]  # those that rank 0 of 3 needs
    assert job(restore, lambda rank: "cde"[rank], 3) == [None] * 3  # what only lost hosts have is in none of these
    assert job(restore, lambda rank: "dabef"[rank], 5) == [2] * 5


def test_what_hosts_hold_alike_comes_to_each_host_once(
    job: Any, tmp_path: Path, brought: Any, caplog: pytest.LogCaptureFixture
) -> None:
    state = [Split.replicas("same", SHAPES, rank, RANKS) for rank in range(RANKS)]
    job(lambda ckpt, _, rank: save(1)(ckpt, [state[rank]], rank), "abcd".__getitem__)
    assert "hold some arrays alike" not in caplog.text
    assert job(lambda ckpt, _, rank: restore(ckpt, [state[rank]], rank), "abcd".__getitem__) == [1] * RANKS
    came = [(container, receiver) for container, _, receiver in brought]
    assert len(came) == 2 * len({*came})  # once to each host, as its sender and its receiver have noted
    assert {receiver for _, receiver in came} == {*range(RANKS)}


@pytest.mark.parametrize(("where", "kind"), [("data", CorruptError), ("index", FormatError)])
def test_a_damaged_container_is_brought_from_a_copy(
    where: str, kind: type[Exception], job: Any, tmp_path: Path, brought: Any
) -> None:
    job(save(1, 2))
    job(restore, lambda rank: "ba"[rank // 2])  # each host has everything now
    damaged = [tmp_path / host / "run" / "step-00000002" / EVERY[3] for host in "ba"]
    whole = damaged[0].read_bytes()
    at = 2000 if where == "data" else whole.index(read_index(Location(damaged[0])).index) + 9
    flip(damaged[0], at)
    brought.clear()
    assert job(restore) == [2] * RANKS
    assert {*brought} == {(3, 0, 3)}
    assert damaged[0].read_bytes() == whole
    for file in damaged:  # no copy is whole, and what is damaged is not sent
        flip(file, at)
    told = job(restore)
    assert isinstance(told[3], kind)
    assert str(damaged[0]) in str(told[3])
    assert "step=1" in str(told[3])  # an older checkpoint that looks whole


def test_the_next_holder_is_asked(job: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job(save(1))
    job(restore, lambda rank: "ba"[rank // 2])
    shutil.copytree(tmp_path / "a", tmp_path / "c")
    (tmp_path / "a" / "run" / "step-00000001" / EVERY[0]).unlink()
    flip(tmp_path / "b" / "run" / "step-00000001" / EVERY[0])
    caplog.clear()
    assert job(restore, lambda rank: "abc"[rank], 3) == [1] * 3
    assert "could not send it" in caplog.text or "was not brought" in caplog.text


def test_a_host_comes_before_a_place_that_all_reach(job: Any, tmp_path: Path, brought: Any) -> None:
    tiers = {"tiers": [tmp_path / "far"]}
    job(lambda ckpt, state, rank: (save(1)(ckpt, state, rank), ckpt.wait_drained(60)), **tiers)
    told = job(source, lambda rank: "ba"[rank // 2], **tiers)
    assert all(str(tmp_path / "far") not in one for one in told)
    assert brought
    for host in "ab":
        shutil.rmtree(tmp_path / host / "run")
    assert [[*one] for one in job(source, **tiers)] == [[str(tmp_path / "far")]] * RANKS


def test_names_are_looked_for_in_all_containers(job: Any, tmp_path: Path) -> None:
    """As where keys are renamed."""
    job(save(1))

    def missed(ckpt: Any, state: Any, rank: int) -> list[int]:
        tier = ckpt._place.listing
        (one,) = tier.checkpoints()
        stored = Stored(Head.of(one.path, manifest.open(one.path)), gathering=tier.gathering())
        with pytest.raises(ElsewhereError) as caught:
            _ = stored.keys
        return caught.value.ranks

    assert job(missed) == [[2, 3], [2, 3], [0, 1], [0, 1]]


def test_a_host_that_fails_to_send_is_told_by_name(
    job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job(save(1))
    monkeypatch.setattr(gathering, "SILENCE", 0.5)

    def silent(*words: Any) -> None:
        raise CorruptError("it is damaged", key="x", path="y")

    with monkeypatch.context() as patch:
        patch.setattr(gathering, "send", silent)
        for rank, error in enumerate(job(restore, lambda rank: "ba"[rank // 2])):
            assert isinstance(error, RestoreError)
            assert f"{EVERY[rank]} of step 1 is needed and is not in" in str(error)
    assert "was not brought from rank 2 to rank 0: it is damaged" in caplog.text
    assert job(restore, lambda rank: "ba"[rank // 2]) == [1] * RANKS
