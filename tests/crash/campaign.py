"""Run rounds of random states, faults, kills and early changes; check that all that was committed is right.

Usage: ``campaign.py DIRECTORY [--seed N] [--rounds N] [--jobs N]``. The seed alone determines a round. A round that
fails prints its seed, its plan and what was reported; ``--seed`` with ``--rounds 1`` runs it again. A round consists of
lives, which are processes forked from this one. Each life reports on a pipe what it has done.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import dataclasses
import faulthandler
import itertools
import json
import logging
import multiprocessing
import os
import queue
import select
import shutil
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import torch
from campaign_plan import Life, Round, Save, draw
from campaign_state import State, change
from random_states import differences

import datastates as ds
from datastates import _native
from datastates._base import faults
from datastates.commit import fence, retention
from datastates.commit.newest import committed
from datastates.commit.tiers import tier_of
from datastates.errors import DatastatesError, StorageError, TornSnapshotError
from datastates.executor.executor import arm_faults
from datastates.formats.own import verify_container
from datastates.kept import Keep
from datastates.reading.every_container import open_checkpoint
from datastates.saving.snapshot import wait_ended, wait_free

HANGS = 30
"""Seconds without a report after which a life is taken to hang."""
M_MMAP_THRESHOLD = -3  # of malloc.h
SHOWN = 200
"""Rounds after which a process says how many have passed."""


class WrongError(Exception):
    """A round has shown a defect."""


def check(holds: bool, what: object) -> None:
    if not holds:
        raise WrongError(str(what))


# --- in a life


def disarm() -> None:
    faults.clear()
    _native.clear_faults()


class Told:
    """Reports to the parent what has happened, and, on a thread of its own, how each snapshot has ended."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self.failing = False
        """Whether a fault that makes a snapshot fail has been armed. It may hit an earlier snapshot in flight."""
        self._taken: queue.Queue[tuple[Save, ds.Snapshot, set[str]] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()

    def say(self, event: str, *details: Any) -> None:
        os.write(self._pipe, json.dumps([event, *details]).encode() + b"\n")

    def follow(self, save: Save, snapshot: ds.Snapshot, torn: set[str]) -> None:
        """Report how a snapshot ends. ``torn`` are the keys that were changed without the gate."""
        self._taken.put((save, snapshot, torn))

    def end(self) -> None:
        self._taken.put(None)
        self._thread.join()

    def _follow(self) -> None:
        while (entry := self._taken.get()) is not None:
            save, snapshot, torn = entry
            wait_ended([snapshot])
            error = snapshot.exception()
            if error is None:
                self.say("committed", save.number)
                if snapshot.report.executor.get("shared"):
                    self.say("shared", save.number)
                continue
            named = isinstance(error, TornSnapshotError) and bool(error.keys) and set(error.keys) <= torn
            expected = named or (self.failing and isinstance(error, StorageError))
            self.say("failed" if expected else "wrong", save.number, type(error).__name__, str(error))


def live(life: Life, root: Path, newest: Save | None, told: Told) -> None:
    """Live one life: restore the save ``newest``, then save."""
    before = committed(tier_of(root))
    with ds.Checkpointer(root, **life.options) as ckpt:
        told.say("opened")
        check(committed(tier_of(root)) == before, "opening lost a checkpoint")
        state: State | None = None
        if newest is not None:
            state = State(newest.structure)
            state.fill(0)
            arm_faults(life.read_fault)
            try:
                restored = ckpt.restore(state.providers)
            except StorageError:
                check("fail" in life.read_fault, "a restore failed without a fault")
                disarm()
                restored = ckpt.restore(state.providers)
            disarm()
            check(restored is not None and restored.step == newest.step, f"{restored}, the newest is {newest.step}")
            wrong = differences(state.contents(), expected_of(newest))
            check(not wrong, f"restored differently: {wrong}")
            told.say("restored", newest.number)
        structure = None if newest is None else newest.structure
        for save in life.saves:
            if state is None or save.structure != structure:
                state, structure = State(save.structure), save.structure
            with ckpt.gate():
                state.fill(save.number)
            told.failing |= "fail" in save.fault
            arm_faults(save.fault)
            told.say("calling", save.number, save.step)
            snapshot = ckpt.snapshot(state.providers, step=save.step)
            told.say("taken", save.number)
            state.touch_eager()
            torn: set[str] = set()
            if save.change == "step":
                if state.model is not None:
                    state.optimizer.step()  # the optimizer waits for the gate by itself
            elif save.change:
                if save.gated:
                    ckpt.gate()
                keys = change(state, save.change, save.number)
                torn = set() if save.gated else keys
                state = None
            told.follow(save, snapshot, torn)
            if save.wait == "captured":
                wait_free(snapshot)
            elif save.wait == "committed":
                wait_ended([snapshot])
        if life.end == "leave":
            os._exit(0)
    told.end()
    told.say("closed")


def expected_of(save: Save) -> dict[str, Any]:
    """The contents of the state when a save was called."""
    state = State(save.structure)
    state.fill(save.number)
    return state.contents()


# --- in the parent


def run_life(life: Life, root: Path, newest: Save | None, events: list[list[Any]]) -> int:
    """Run a life in a process of its own and note its reports; returns its exit status as ``waitpid`` gives it."""
    sys.stdout.flush()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _in_child(life, root, newest, writing)
    os.close(writing)
    signals = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM}
    try:
        for event in _events(reading, child):
            events.append(event)
            if len(events) == life.event and life.end in signals:
                os.kill(child, signals[life.end])
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        os.close(reading)
        status = os.waitpid(child, 0)[1]
    return status


def _in_child(life: Life, root: Path, newest: Save | None, pipe: int) -> NoReturn:
    code = 1
    try:
        told = Told(pipe)
        live(life, root, newest, told)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _events(pipe: int, child: int) -> Iterator[list[Any]]:
    """The reports until the process has ended, without a report that a kill cut short."""
    left = b""
    while True:
        if not select.select([pipe], [], [], HANGS)[0]:
            os.kill(child, signal.SIGABRT)  # faulthandler shows where it hangs
            select.select([pipe], [], [], 5)
            raise WrongError(f"nothing was reported for {HANGS} s")
        data = os.read(pipe, 1 << 16)
        if not data:
            return
        *lines, left = (left + data).split(b"\n")
        yield from map(json.loads, lines)


class Audit:
    """Compares the contents of a directory with what was reported."""

    def __init__(self, root: Path, plan: Round) -> None:
        self._root = root
        self._plan = plan
        self._saves = {save.number: save for life in plan.lives for save in life.saves}
        self._called: set[int] = set()
        self._committed: set[int] = set()
        self._failed: set[int] = set()
        self._found: dict[int, int] = {}

    def life(self, life: Life, status: int, events: list[list[Any]]) -> tuple[str, Save | None]:
        """Check how a life ended and what it left; returns its outcome, and the newest committed save."""
        said: dict[str, set[int]] = collections.defaultdict(set)
        for event, *details in events:
            check(event != "wrong", details)
            if details:
                said[event].add(details[0])
        self._called |= said["calling"]
        self._committed |= said["committed"]
        self._failed |= said["failed"]
        faults_of_it = [s.fault for s in life.saves]
        signalled = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        allowed = {0}
        if any("kill" in fault for fault in faults_of_it) or life.end == "kill":
            allowed.add(signal.SIGKILL)
        if life.end == "terminate":
            allowed.add(signal.SIGTERM)
        check(signalled in allowed and (signalled or os.WEXITSTATUS(status) == 0), f"ended with status {status:#x}")
        newest = self._contents()
        failing = any("fail" in fault for fault in faults_of_it)
        closed = any(event[0] == "closed" for event in events)
        if closed:
            check(said["calling"] == said["committed"] | said["failed"], "closed, and something has not ended")
            check(failing or tier_of(self._root).debris() == [], "closed, and something was left")
        if signalled == signal.SIGTERM and not failing:  # what was in flight then was still committed
            taken = {details[0] for event, *details in events[: life.event] if event == "taken"}
            changed = {save.number for save in life.saves if save.change and not save.gated}
            self._present(taken - changed)
        self._present(self._committed)
        ends = {0: "left", signal.SIGKILL: "killed", signal.SIGTERM: "terminated"}
        return "closed" if closed else ends[signalled], newest

    def _present(self, numbers: set[int]) -> None:
        """Check that saves are there, or were superseded or deleted as the settings say."""
        keep = self._plan.keep_last
        for number in numbers:
            step = self._saves[number].step
            later = [n for n in self._found.values() if n > number]
            if keep is None or len(later) < keep:
                check(self._found.get(step, -1) >= number, f"save {number} of step {step} is lost: {self._found}")

    def _contents(self) -> Save | None:
        """Check all committed checkpoints, to the bit; returns the newest save."""
        there = committed(tier_of(self._root))
        self._found = {}
        for step, path in there.items():
            opened, containers = open_checkpoint(path)
            check(opened.step == step, f"{path} is of step {opened.step}")
            problems = [p for c in containers for p in verify_container(c, lambda _: None)]
            check(not problems, problems)
            found = ds.load(path, host_cache="2MiB", block="1MiB")
            self._found[step] = number = found["object"]["number"]
            check(number in self._called and number not in self._failed, f"save {number} is visible")
            save = self._saves[number]
            check(save.step == step, f"save {number} stands as step {step}")
            wrong = differences(found, expected_of(save))
            check(not wrong, f"save {number} differs at {wrong}")
        known = {*there.values(), *retention.outdated(tier_of(self._root), Keep()), self._root / fence.FOLDER}
        # killed between the making of the lock file and its line: the directory stays for a day, as nobody is known
        nobodys = {path.parent for path in self._root.glob("*/.lock") if not path.stat().st_size}
        left = set(self._root.iterdir()) - known - nobodys
        check(left == set(tier_of(self._root).debris()), f"neither a checkpoint nor debris: {left}")
        return self._saves[max(self._found.values())] if self._found else None


DEFECTS = (WrongError, DatastatesError, OSError, LookupError)
"""What a round raises where it shows a defect."""


def run_round(seed: int, base: Path, outcomes: collections.Counter[str]) -> None:
    """Run one round, and count its outcomes. If it shows a defect, print the whole round and raise."""
    plan = draw(seed)
    root = Path(tempfile.mkdtemp(prefix=f"round-{seed}-", dir=base))
    audit = Audit(root, plan)
    newest: Save | None = None
    reported: list[list[list[Any]]] = []
    try:
        for life in plan.lives:
            reported.append([])
            status = run_life(life, root, newest, reported[-1])
            outcome, newest = audit.life(life, status, reported[-1])
            outcomes[outcome] += 1
            for event, *details in reported[-1]:
                if event in ("restored", "committed", "shared", "failed"):
                    outcomes[details[1] if event == "failed" else event] += 1
    except DEFECTS:
        print(f"ROUND {seed} SHOWS A DEFECT; what it left is in {root}")
        for life, events in zip(plan.lives, reported, strict=False):
            print(dataclasses.replace(life, saves=()), *life.saves, "reported:", *events, sep="\n    ")
        traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
        raise
    shutil.rmtree(root)


def run(seeds: range, base: Path) -> tuple[collections.Counter[str], list[int]]:
    """Run the rounds of some seeds; returns the outcomes, and the seeds that showed defects."""
    outcomes: collections.Counter[str] = collections.Counter()
    wrong = []
    for number, seed in enumerate(seeds):
        try:
            run_round(seed, base, outcomes)
        except DEFECTS:
            wrong.append(seed)
        outcomes["rounds"] += 1
        if number % SHOWN == SHOWN - 1:
            print(dict(outcomes), "wrong:", wrong, flush=True)
    return outcomes, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=1, help="of the first round")
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the rounds")
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    faulthandler.enable()
    logging.getLogger("datastates").setLevel(logging.CRITICAL)
    # freed memory is unmapped at once, so that a late read of it kills the process
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    torch.set_num_threads(1)  # no threads before a fork
    for structure in range(5):  # imports what an optimizer needs before any fork
        State(structure)
    end = arguments.seed + arguments.rounds
    shares = [range(arguments.seed + job, end, arguments.jobs) for job in range(arguments.jobs)]
    outcomes: collections.Counter[str] = collections.Counter()
    wrong: list[int] = []
    with ProcessPoolExecutor(arguments.jobs, multiprocessing.get_context("fork")) as pool:
        for counted, seeds in pool.map(run, shares, itertools.repeat(arguments.directory)):
            outcomes += counted
            wrong += seeds
    print(*(f"{count:8} {outcome}" for outcome, count in sorted(outcomes.items())), sep="\n")
    print(f"seeds that showed defects: {sorted(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
