"""What the processes of the campaign with tiers do, each reporting on a pipe."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from random_states import differences
from tier_plan import DRAIN, RUN, Process, Round, Stage

import datastates as ds
from datastates.cli import commands
from datastates.commit.nearest import Nearest
from datastates.commit.newest import in_order
from datastates.commit.tiers import tier_of
from datastates.draining import drain
from datastates.errors import DatastatesError, SnapshotTimeoutError, StorageError
from datastates.formats.own import verify_container
from datastates.providers import HostTensorProvider, PickledObjectProvider
from datastates.reading.every_container import open_checkpoint
from datastates.storage.buckets import Buckets
from datastates.storage.local import LocalStore
from datastates.storage.location import Location

REQUESTS = ("look", "file", "entries", "read", "read_into", "ending", "read_all", "create", "upload", "discard")
RANK_SECONDS = {True: 1.0, False: 40.0}
"""Seconds for which a rank waits for another one, in a stage that harms or not."""


def part_of(number: int, rank: int) -> dict[str, Any]:
    """What a rank saves of a number: seldom more than one part of an upload. Some of it is alike in a round."""
    rng = np.random.default_rng([number, rank])
    count = int(rng.choice([10, 1000, 30_000, 30_000, 1_200_000], p=[0.3, 0.3, 0.2, 0.18, 0.02]))
    frozen = np.random.default_rng([number // 100, rank, 0]).random(20_000)
    return {"w": rng.random(count), "seen": rng.integers(0, 256, 77, np.uint8), "frozen": frozen}


def state_of(number: int, ranks: int) -> dict[str, Any]:
    """The whole checkpoint of a number."""
    return {**{f"rank{rank}": part_of(number, rank) for rank in range(ranks)}, "number": number}


class Live:
    """The live state of a rank."""

    def __init__(self, rank: int) -> None:
        self.rank, self.number = rank, 0
        self.arrays = part_of(0, rank)

    def fill(self, number: int) -> None:
        self.number, self.arrays = number, part_of(number, self.rank)

    @property
    def providers(self) -> list[Any]:
        own = HostTensorProvider(f"rank{self.rank}", self.arrays, lazy=True)
        number = PickledObjectProvider("number", get=lambda: self.number, set=self._take)
        return [own, *([number] if self.rank == 0 else [])]

    def _take(self, number: int) -> None:
        self.number = number


class Requests:
    """Counts the requests of this process to stores; kills it at one, and lets some to the far place fail."""

    def __init__(self, far: Location, kill_at: int, dead: tuple[int, int]) -> None:
        self._far, self._kill_at, self._dead = far, kill_at, dead
        self._count = self._of_far = 0
        call = LocalStore._call

        def counted(store: LocalStore, operation: str, path: Location, point: str = "") -> Any:
            self(operation, path)
            return call(store, operation, path, point)

        LocalStore._call = counted  # type: ignore[assignment]
        for name in REQUESTS:
            setattr(Buckets, name, self._before(name, getattr(Buckets, name)))

    def _before(self, name: str, request: Callable[..., Any]) -> Callable[..., Any]:
        def counted(store: Buckets, path: Any, *words: Any, **more: Any) -> Any:
            self(name, path[0] if isinstance(path, (list, tuple)) and path else path)
            return request(store, path, *words, **more)

        return counted

    def __call__(self, operation: str, path: Any) -> None:
        self._count += 1
        if self._count == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if isinstance(path, Location) and path.is_relative_to(self._far):
            self._of_far += 1
            if self._dead[0] <= self._of_far < self._dead[1]:
                raise StorageError(errno.ETIMEDOUT, operation, str(path), f"{operation} {path}: it does not answer")


Say = Callable[..., None]


def in_child(process: Process, stage: Stage, plan: Round, places: tuple[Path, Location], pipe: int) -> None:
    """Do what a process does, then exit."""

    def say(event: str, *details: Any) -> None:
        os.write(pipe, json.dumps([event, *details]).encode() + b"\n")

    drain._SHORTEST, drain._LONGEST, drain._AHEAD = 0.01, 0.05, 0.2
    memory = Location(places[0]) if plan.memory else None  # whatever it really is
    LocalStore.is_in_memory = lambda store, path: path == memory  # type: ignore[assignment]
    Requests(places[1], process.kill_at, stage.dead)
    if process.what == RUN:
        _run(process, stage, plan, places, say)
    else:
        _command(process, places, say)


def _run(process: Process, stage: Stage, plan: Round, places: tuple[Path, Location], say: Say) -> None:
    first, far = places
    ranks: dict[str, Any] = {"rank": process.rank, "world_size": plan.ranks, "rank_timeout": RANK_SECONDS[stage.harms]}
    options: dict[str, Any] = {
        **(ranks if plan.ranks > 1 else {}),
        **{"host_cache": "2MiB", "block": "1MiB", "keep_last": plan.keep[0], "on_error": "warn"},
        **{"tiers": {"path": str(far), "keep_last": plan.keep[1]}, "handle_sigterm": stage.signal == "TERM"},
        **plan.options,
    }
    live = Live(process.rank)
    taken: list[tuple[int, ds.Snapshot]] = []
    told: set[tuple[str, int]] = set()

    def tell() -> None:
        for number, one in taken:
            told_now = [("committed", number)] * one.committed
            if one.committed and len(one.report.places) > 1:
                told_now.append(("placed", number))
            if one.committed and one.report.executor.get("shared"):
                told_now.append(("shared", number))
            for event in told_now:
                if event not in told:
                    told.add(event)
                    say(*event)

    with ds.Checkpointer(first, **options) as checkpointer:
        say("opened")
        if stage.restores:
            try:
                _restore(checkpointer, live, process, plan, say)
            except StorageError:
                if not stage.dead[1]:
                    raise
                say("dead")  # and the run begins without it
        for save in stage.saves:
            checkpointer.gate()
            live.fill(save.number)
            say("calling", save.number)
            taken.append((save.number, checkpointer.snapshot(live.providers, step=save.step)))
            if save.wait:
                checkpointer.wait()
            if save.wait == "drained":
                tell()
                with contextlib.suppress(SnapshotTimeoutError):
                    checkpointer.wait_drained(0.2 if stage.dead[1] else 20)
                    for number, one in taken:
                        if one.committed and process.rank == 0:
                            say("placed", number)
            tell()
        checkpointer.wait()
        tell()
        if stage.end == "leave":
            os._exit(0)
    tell()
    say("closed")


def _restore(checkpointer: ds.Checkpointer, live: Live, process: Process, plan: Round, say: Say) -> None:
    newest = next(reversed(in_order(checkpointer._place.listing.checkpoints())), None)
    if newest is None:
        assert checkpointer.restore(live.providers) is None
        return
    number = ds.load(newest.path.face, host_cache="2MiB", block="1MiB")["number"]
    live.fill(number)
    for array in live.arrays.values():
        array[...] = 0
    live.number = -1
    restored = checkpointer.restore(live.providers)
    assert restored is not None
    wrong = differences(live.arrays, part_of(number, process.rank))
    assert not wrong, f"{restored.path}, save {number}, restored differently: {wrong}"
    say("restored", number)


def _command(process: Process, places: tuple[Path, Location], say: Say) -> None:
    first, far = places
    way = (first, far) if process.what == DRAIN else (far, first.with_name(f"fetched-{os.getpid()}"))
    step = [] if process.step is None else ["--step", str(process.step)]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as text:
        status = commands.main([process.what, *map(str, way), *step])
    say("ended", status, text.getvalue())
    if process.what != DRAIN and status == 0:
        (one,) = tier_of(Location(way[1])).checkpoints(certain=True)
        say("fetched", _number_at(one.path))


def audit(plan: Round, places: tuple[Path, Location], say: Say) -> None:
    """Report each checkpoint of both places, compared to the bit, the oldest first."""
    tiers = [tier_of(Location(place)) for place in places]
    for name, tier in zip(("first", "far"), tiers, strict=True):
        for one in in_order(tier.checkpoints(certain=True)):
            say(name, _number_at(one.path, plan.ranks), one.step)
        nobodys = [path for path in places[0].glob("*/.lock") if name == "first" and not path.stat().st_size]
        say("debris", name, [] if nobodys else [str(path) for path in tier.debris()])
    for one in in_order(Nearest(tiers).checkpoints(certain=True)):
        say("nearest", _number_at(one.path))


def _number_at(path: Location, ranks: int = 0) -> int:
    found = ds.load(path.face, host_cache="2MiB", block="1MiB")
    number = int(found["number"])
    if ranks:
        assert sum(isinstance(one, dict) for one in found.values()) == ranks
        problems = [p for c in open_checkpoint(path)[1] for p in verify_container(c, lambda _: None)]
        assert not problems, problems
    wrong = differences(dict(sorted(found.items())), dict(sorted(state_of(number, len(found) - 1).items())))
    assert not wrong, f"{path}, save {number}, differs at {wrong}"
    return number


@contextlib.contextmanager
def telling(pipe: int, expects: bool) -> Iterator[None]:
    """Report an error of the block: as a defect unless the stage ``expects`` errors of this package."""
    import traceback

    try:
        yield
    except BaseException as error:
        kind = "failed" if expects and isinstance(error, DatastatesError) else "wrong"
        text = traceback.format_exc()
        os.write(pipe, json.dumps([kind, type(error).__name__, text[-3000:]]).encode() + b"\n")
