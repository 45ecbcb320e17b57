"""Each host keeps a copy of another host's containers: a host that is lost loses nothing."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from per_host_job import OPTIONS, RANKS, host_of, names, restore, save

import datastates as ds
from datastates.commit import carry
from datastates.draining import bring, peers
from datastates.draining.drains import Drains
from datastates.errors import SettingsError, StorageError
from datastates.ranks.link import Link
from datastates.storage import Location

pytestmark = pytest.mark.usefixtures("links", "machines")
EVERY = [f"rank-0000{rank}.pt" for rank in range(RANKS)]


def files(tmp_path: Path, host: str, step: int) -> list[str]:
    return names(tmp_path / host / "run" / f"step-0000000{step}")[2:]


def copied(*steps: int) -> Callable[..., Any]:
    """Save, wait for the copies, and give where the last checkpoint is."""

    def do(ckpt: ds.Checkpointer, state: Any, rank: int) -> Any:
        for step in steps:
            taken = ckpt.snapshot([state[0].fill(step), *state[1:]], step=step)
            ckpt.wait()
            ckpt.wait_drained(50)
        return taken.report.places

    return do


def test_a_lost_host_loses_nothing(job: Any, tmp_path: Path) -> None:
    assert job(copied(1, 2), peers=1) == [(tmp_path / host_of(rank) / "run", "peers") for rank in range(RANKS)]
    for lost in "ba":
        shutil.rmtree(tmp_path / lost)
        assert job(restore, peers=1) == [2] * RANKS
        for host in "ab":  # and copies are there again
            assert files(tmp_path, host, 2) == EVERY
    shutil.rmtree(tmp_path / "a")
    assert job(restore, lambda rank: "cbd"[rank], 3) == [2] * 3


def test_three_hosts_and_an_odd_one(job: Any, tmp_path: Path) -> None:
    three = "aabc"
    job(copied(1), lambda rank: three[rank], 4, peers=1)
    assert files(tmp_path, "a", 1) == [EVERY[0], EVERY[1], EVERY[3]]
    assert files(tmp_path, "b", 1) == [EVERY[0], EVERY[1], EVERY[2]]
    assert files(tmp_path, "c", 1) == [EVERY[2], EVERY[3]]
    shutil.rmtree(tmp_path / "b")
    assert job(restore, lambda rank: three[rank], 4, peers=1) == [1] * 4


def test_what_is_copied_stays_until_something_newer_is(
    job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, send = threading.Event(), peers.send
    goes_on.set()

    def held(*words: Any) -> None:
        assert goes_on.wait(50)
        send(*words)

    monkeypatch.setattr(peers, "send", held)
    seen = []

    def do(ckpt: ds.Checkpointer, state: Any, rank: int) -> Any:
        copied(1)(ckpt, state, rank)
        meet.wait(50)
        goes_on.clear()
        meet.wait(50)
        save(2, 3)(ckpt, state, rank)
        if rank == 0:
            seen.append(names(tmp_path / "a" / "run"))
        meet.wait(50)
        goes_on.set()
        ckpt.wait_drained(50)

    meet = threading.Barrier(RANKS)
    assert job(do, peers=1, keep_last=1) == [None] * RANKS
    assert seen == [["step-00000001", "step-00000003"]]
    for host in "ab":
        assert names(tmp_path / host / "run") == ["step-00000003"]
        assert files(tmp_path, host, 3) == EVERY


def test_a_broken_link_is_made_again(job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    make = Link.__init__
    monkeypatch.setattr(Link, "__init__", lambda link, *words, **named: made.append(make(link, *words, **named)))

    def do(ckpt: ds.Checkpointer, state: Any, rank: int) -> Any:
        copied(1, 2)(ckpt, state, rank)
        meet.wait(50)
        first = len(made)
        meet.wait(50)
        assert ckpt._place.peers is not None
        links = ckpt._place.peers._links
        while links and rank == 0:
            links.popitem()[1].close()
        meet.wait(50)
        return first, copied(3)(ckpt, state, rank)[1:]

    meet = threading.Barrier(RANKS)
    assert job(do, peers=1) == [(2 * RANKS, ("peers",))] * RANKS  # once for two checkpoints
    assert files(tmp_path, "a", 3) == EVERY


def test_a_full_disk_of_a_peer_costs_no_snapshot(
    job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    receive = carry.receive

    def full(link: Any, one: Any) -> None:
        if "step-00000002/rank-00003" in str(one.path) and "/a/" in str(one.path):
            raise StorageError(errno.ENOSPC, "write", str(one.path))
        receive(link, one)

    monkeypatch.setattr(peers, "receive", full)
    monkeypatch.setattr(peers, "SILENCE", 0.5)

    def do(ckpt: ds.Checkpointer, state: Any, rank: int) -> Any:
        places = []
        for step in (1, 2, 3):
            taken = ckpt.snapshot([state[0].fill(step), *state[1:]], step=step)
            ckpt.wait()
            assert taken.exception() is None
            if step != 2:
                ckpt.wait_drained(50)
            else:
                with pytest.raises(ds.errors.SnapshotTimeoutError, match="what rank 3 wrote of step 2 is on one host"):
                    ckpt.wait_drained(50)
            places.append(taken.report.places[1:])
        return places, ckpt.steps()

    # of the two that are kept, the one that is not copied goes first where a host is lost
    assert job(do, peers=1) == [([("peers",), (), ("peers",)], [1, 2, 3])] * RANKS
    (told,) = [one.message for one in caplog.records if "is on one host only" in one.message]
    assert "No space left on device" in told
    shutil.rmtree(tmp_path / "b")
    assert job(restore, peers=1) == [3] * RANKS


def test_damage_is_not_copied(job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    send = peers.send
    monkeypatch.setattr(peers, "SILENCE", 0.5)

    def damaged(link: Any, one: Any, pace: Any) -> None:
        if one.path.name == EVERY[1]:
            file = Path(str(one.path))
            data = bytearray(file.read_bytes())
            data[2000] ^= 1
            file.write_bytes(data)
        send(link, one, pace)

    monkeypatch.setattr(peers, "send", damaged)

    def do(ckpt: ds.Checkpointer, state: Any, rank: int) -> Any:
        save(1)(ckpt, state, rank)
        with pytest.raises(ds.errors.SnapshotTimeoutError, match="what rank 1 wrote of step 1 is on one host only"):
            ckpt.wait_drained(50)

    assert job(do, peers=1) == [None] * RANKS
    assert files(tmp_path, "b", 1) == [EVERY[0], *EVERY[2:]]


def test_a_newer_checkpoint_goes_first(job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, goes_on, send = threading.Barrier(RANKS + 1), threading.Event(), peers.send
    sent: set[str] = set()

    def held(link: Any, one: Any, pace: Any) -> None:
        if not goes_on.is_set():
            begun.wait(50)
            assert goes_on.wait(50)
        sent.add(one.path.parent.name)
        send(link, one, pace)

    monkeypatch.setattr(peers, "send", held)

    def do(ckpt: ds.Checkpointer, state: Any, rank: int) -> Any:
        save(1)(ckpt, state, rank)
        if rank == 0:
            begun.wait(50)
        meet.wait(50)
        save(2, 3, 4)(ckpt, state, rank)
        ended = ckpt._place.peers
        assert ended is not None
        ended._bell.wait_for(lambda: not ended._attempts, 50)
        meet.wait(50)
        goes_on.set()
        ckpt.wait_drained(50)

    meet = threading.Barrier(RANKS)
    assert job(do, peers=1) == [None] * RANKS
    assert sent == {"step-00000001", "step-00000004"}


def test_of_two_copies_one_goes_on(job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job(copied(1), peers=1)
    sent, compared = [], bring.compared
    monkeypatch.setattr(bring, "compared", lambda one, pace: sent.append(str(one.path)) or compared(one, pace))
    tiers = {"tiers": [tmp_path / "far"]}
    job(lambda ckpt, state, rank: (save(2)(ckpt, state, rank), ckpt.wait_drained(60)), **tiers)
    assert names(tmp_path / "far") == ["step-00000001", "step-00000002"]
    of_first = {one for one in sent if "step-00000001" in one}
    assert of_first == {f"{tmp_path}/{host_of(r)}/run/step-00000001/{EVERY[r]}" for r in range(RANKS)}


def test_after_sigterm_copies_are_waited_for_last(job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They go on meanwhile, and a silent peer must not take the time of what goes to a safer place."""
    calls: list[str] = []
    monkeypatch.setattr(Drains, "hurry", lambda self, end: calls.append("hurry"))
    monkeypatch.setattr(peers.Peers, "wait", lambda self, timeout=None: calls.append("wait") or "")
    job(lambda ckpt, state, rank: ckpt._finish(None) if rank == 0 else None, peers=1)
    assert calls == ["hurry", "wait"]


def test_a_forked_child_closes_at_once(job: Any) -> None:
    def do(ckpt: ds.Checkpointer, state: Any, rank: int) -> Any:
        copied(1)(ckpt, state, rank)
        meet.wait(50)
        kept = ckpt._place.peers
        assert kept is not None
        kept._attempts[Location("/later")] = (2, "0" * 8)
        if rank == 0 and (child := os.fork()) == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)  # ends a child that hangs
            kept.close()
            os._exit(len(kept._links))
        kept._attempts.clear()
        return os.waitpid(child, 0)[1] if rank == 0 else 0

    meet = threading.Barrier(RANKS)
    assert job(do, peers=1) == [0] * RANKS


def test_what_the_setting_needs(tmp_path: Path, threads: Any, caplog: pytest.LogCaptureFixture, job: Any) -> None:
    with pytest.raises(SettingsError, match="peers: set per_host, too"):
        ds.Checkpointer(tmp_path, peers=1)
    with pytest.raises(SettingsError, match="peers: Input should be 0 or 1"):
        ds.Checkpointer(tmp_path, peers=2, per_host=True)  # type: ignore[arg-type]
    threads(1, lambda rank: ds.Checkpointer(tmp_path / "alone", peers=1, per_host=True).close())
    assert "peers: no copies are kept, as there is one rank only" in caplog.text
    assert job(copied(1), lambda rank: "a", peers=1) == [(tmp_path / "a" / "run",)] * RANKS
    assert "peers: no copies are kept, as all ranks are on one host" in caplog.text
    told = threads(2, lambda rank: ds.Checkpointer(tmp_path / "ab"[rank] / "run", **OPTIONS, peers=rank))
    assert "with peers" in str(told[0])


def test_ranks_without_torch_are_told(tmp_path: Path, threads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memory_keys.Memory.links", None)
    for error in threads(2, lambda rank: ds.Checkpointer(tmp_path / "ab"[rank] / "run", **OPTIONS, peers=1)):
        assert isinstance(error, SettingsError)
        assert str(error) == "peers: copies go through torch.distributed: initialize it first"
