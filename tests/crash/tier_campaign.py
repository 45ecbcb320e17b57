"""Run rounds of runs with a far place, commands beside them, kills and emptied disks; check what tiers promise.

Usage: ``tier_campaign.py DIRECTORY [--far disk|moto|localbucket] [--seed N] [--rounds N]``. The seed determines the
plan of a round, not how its processes meet. A round that fails prints its plan and what was reported. Processes are
forked from this one, which asks no store itself.

After each stage: what lies in the places is what was saved, to the bit, and in the order of time. What was reported to
be committed can be restored while its disk is there, and what was reported to be in the far place without it, unless
retention says otherwise. After the last stage, the far place has all that was due.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import dataclasses
import faulthandler
import json
import logging
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "support")]

import servers  # noqa: E402
import tier_lives  # noqa: E402
from tier_plan import DRAIN, FETCH, RUN, Process, Round, Save, Stage, draw  # noqa: E402

from datastates.storage.location import Location  # noqa: E402

HANGS = 240
"""Seconds after which the processes of a stage are taken to hang."""
SHOWN = 100
"""Rounds after which it is said how many have passed."""
IN_MEMORY = 2
"""Checkpoints that are due and stay in memory all the same."""
PR_SET_PDEATHSIG = 1
Events = list[list[Any]]


class WrongError(Exception):
    """A round has shown a defect."""


def check(holds: bool, what: object) -> None:
    if not holds:
        raise WrongError(str(what))


# --- processes


class Child:
    """A forked process, and what it has reported."""

    def __init__(self, does: Callable[[int], None]) -> None:
        sys.stdout.flush()
        self.pipe, writing = os.pipe()
        self.events: Events = []
        self.status: int | None = None
        self._left = b""
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.pipe)
            _live(does, writing)
        os.close(writing)

    def read(self) -> bool:
        """Take what it says now; False if it has ended."""
        data = os.read(self.pipe, 1 << 16)
        *lines, self._left = (self._left + data).split(b"\n")
        self.events += map(json.loads, lines)
        if not data:
            os.close(self.pipe)
            self.status = os.waitpid(self.pid, 0)[1]
        return bool(data)


def _live(does: Callable[[int], None], pipe: int) -> NoReturn:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        does(pipe)
    finally:
        sys.stderr.flush()
        os._exit(0)


class Running:
    """The processes of a stage: those that have been started, in the order of the plan."""

    def __init__(self, starts: list[tuple[int, Callable[[int], None]]]) -> None:
        """Take what each does, with the number of reports after which it begins."""
        self._starts = starts
        self.children: dict[int, Child] = {}

    def to_the_end(self, stage: Stage | None = None) -> list[Child]:
        """Follow all to their ends, and send the signal of a stage; returns them."""
        until, sent = time.monotonic() + HANGS, False
        try:
            while self._begin() or self._left():
                left = {child.pipe: child for child in self._left()}
                ready = select.select(list(left), [], [], max(0.0, until - time.monotonic()))[0]
                if not ready:
                    for child in left.values():
                        os.kill(child.pid, signal.SIGABRT)  # faulthandler shows where it hangs
                    time.sleep(2)
                    raise WrongError(f"nothing ended within {HANGS} s")
                for pipe in ready:
                    left[pipe].read()
                if stage is not None and stage.signal and not sent and self._count() >= stage.event:
                    victim = self.children.get(stage.victim)
                    if sent := victim is not None and victim.status is None:
                        os.kill(victim.pid, signal.Signals[f"SIG{stage.signal}"])
        finally:
            for child in self._left():
                os.kill(child.pid, signal.SIGKILL)
                os.waitpid(child.pid, 0)
        return [child for _, child in sorted(self.children.items())]

    def _begin(self) -> bool:
        """Start what is to begin now."""
        for number, (after, does) in enumerate(self._starts):
            if number not in self.children and (self._count() >= after or not self._left()):
                self.children[number] = Child(does)
        return False

    def _left(self) -> list[Child]:
        return [child for child in self.children.values() if child.status is None]

    def _count(self) -> int:
        return sum(len(child.events) for child in self.children.values())


# --- what must hold


class Audit:
    """Compares what lies in the places with what was reported."""

    def __init__(self, plan: Round, base: Path, far: Location) -> None:
        self._plan, self._base, self.far = plan, base, far
        self._saves: dict[int, Save] = {save.number: save for stage in plan.stages for save in stage.saves}
        self._called: set[int] = set()
        self._committed: dict[int, set[int]] = collections.defaultdict(set)  # by disk
        self._placed: set[int] = set()

    def disk(self, number: int) -> Path:
        return self._base / f"disk-{number}"

    def empty(self, number: int) -> None:
        shutil.rmtree(self.disk(number), ignore_errors=True)
        self._committed[number].clear()

    def stage(self, stage: Stage, children: list[Child]) -> None:
        """Check how the processes of a stage ended, and what they left."""
        placed: set[int] = set()
        reached, victim = 0, children[stage.victim]
        if victim.status == signal.SIGTERM and self._plan.ranks == 1 and not stage.dead[1]:  # its newest goes on
            reached = max((details[0] for event, *details in victim.events if event == "committed"), default=0)
        for process, child in zip(stage.processes, children, strict=True):
            said: dict[str, list[Any]] = collections.defaultdict(list)
            for event, *details in child.events:
                check(event != "wrong", "".join(map(str, details)))
                said[event] += details
            killed = process.kill_at or (stage.signal and child is victim)
            check(child.status == 0 or killed, f"{process} ended with status {child.status:#x}")
            self._called |= {*said["calling"]}
            self._committed[stage.disk] |= {*said["committed"]}
            placed |= {*said["placed"]}
            if process.what != RUN and said["ended"]:
                status, text = said["ended"]
                allowed = status == 0 or stage.dead[1] or "no committed checkpoint" in text or "no such" in text.lower()
                check(bool(allowed), f"{process} ended with {status}: {text}")
        check(placed <= set().union(*self._committed.values()), "in the far place, and not committed")
        self._placed |= placed
        self.contents(stage, reached)

    def contents(self, stage: Stage, reached: int) -> None:
        """Check what lies there; ``reached``: the far place has that save or a newer one."""
        places = self.disk(stage.disk), self.far

        def look(pipe: int) -> None:
            def say(event: str, *details: Any) -> None:
                os.write(pipe, json.dumps([event, *details]).encode() + b"\n")

            with tier_lives.telling(pipe, False):
                tier_lives.audit(self._plan, places, say)

        (child,) = Running([(0, look)]).to_the_end()
        found: dict[str, list[int]] = collections.defaultdict(list)
        for event, *details in child.events:
            check(event != "wrong", "".join(map(str, details)))
            if event != "debris":
                found[event].append(details[0])
            else:
                check(stage.harms or stage is not self._plan.stages[-1] or details[1] == [], f"left: {details}")
            if event in ("first", "far"):
                check(details[0] in self._called, f"save {details[0]} is visible, and was never called")
                check(self._saves[details[0]].step == details[1], f"save {details[0]} stands as step {details[1]}")
        first, far, nearest = found["first"], found["far"], found["nearest"]
        check(len({*far}) == len(far) and len({*first}) == len(first), f"a checkpoint came twice: {found}")
        for name, numbers in found.items():
            check(numbers == sorted(numbers), f"not in the order of time: {name} {numbers}")
        check(max(far, default=0) >= reached, f"save {reached} was the newest at SIGTERM, and the far place has {far}")
        for number in self._placed:
            self._present(number, far, far, "in the far place")
        for number in self._committed[stage.disk]:
            self._present(number, nearest, nearest, "committed")
        if stage is self._plan.stages[-1]:
            for number in {*first, *self._committed[stage.disk]}:
                self._present(number, far, nearest, "due")

    def _present(self, number: int, there: list[int], every: list[int], what: str) -> None:
        """Check that a save is there, or was superseded or deleted as the settings say."""
        keep, step = self._plan.keep[1], self._saves[number].step
        later = [n for n in every if n > number]
        superseded = any(self._saves[n].step == step for n in later) or (keep is not None and len(later) >= keep)
        after = {n for committed in self._committed.values() for n in committed if n > number} | {*later}
        dropped = self._plan.memory and what != "in the far place" and len(after) >= IN_MEMORY
        check(
            number in there or superseded or dropped, f"save {number} was {what}, and is lost: {every}, there {there}"
        )


# --- rounds


def run_round(seed: int, base: Path, root: str, outcomes: collections.Counter[str]) -> None:
    """Run one round, and count its outcomes. If it shows a defect, print the whole round and raise."""
    plan = draw(seed)
    folder = Path(tempfile.mkdtemp(prefix=f"round-{seed}-", dir=base))
    audit = Audit(plan, folder, Location.of(f"{root}/{folder.name}/run" if root else folder / "far"))
    told: list[tuple[Stage, Running]] = []
    try:
        for stage in plan.stages:
            if stage.empties:
                audit.empty(stage.disk)
            starts = [(one.after, _does(stage, one, plan, audit)) for one in stage.processes]
            told.append((stage, Running(starts)))
            children = told[-1][1].to_the_end(stage)
            audit.stage(stage, children)
            _count(stage, children, outcomes)
    except (WrongError, OSError, LookupError, ValueError):
        print(f"ROUND {seed} SHOWS A DEFECT; what it left is in {folder} and {audit.far}")
        print(dataclasses.replace(plan, stages=()))
        for stage, running in told:
            print(dataclasses.replace(stage, processes=(), saves=()), *stage.saves, sep="\n    ")
            for number, child in sorted(running.children.items()):
                events = [str(event)[:200] for event in child.events]
                print(f"  {stage.processes[number]} ended with {child.status}, reported:", *events, sep="\n      ")
        traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
        raise
    shutil.rmtree(folder)


def _does(stage: Stage, process: Process, plan: Round, audit: Audit) -> Callable[[int], None]:
    places = audit.disk(stage.disk), audit.far
    expects = bool(stage.dead[1]) or (stage.harms and plan.ranks > 1)

    def does(pipe: int) -> None:
        with tier_lives.telling(pipe, expects):
            tier_lives.in_child(process, stage, plan, places, pipe)

    return does


def _count(stage: Stage, children: list[Child], outcomes: collections.Counter[str]) -> None:
    whole = collections.Counter(event for child in children for event, *_ in child.events)
    outcomes.update({event: count for event, count in whole.items() if event != "calling"})
    outcomes["emptied"] += stage.empties
    for process, child in zip(stage.processes, children, strict=True):
        if child.status:
            outcomes[f"{process.what} ended by {signal.Signals(os.WTERMSIG(child.status)).name}"] += 1
    outcomes["beside"] += len({p.what for p in stage.processes} & {RUN, DRAIN, FETCH}) > 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--far", choices=["disk", "moto", "localbucket"], default="disk")
    parser.add_argument("--seed", type=int, default=1, help="of the first round")
    parser.add_argument("--rounds", type=int, default=1000)
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    faulthandler.enable()
    logging.getLogger("datastates").setLevel(logging.CRITICAL)
    outcomes: collections.Counter[str] = collections.Counter()
    wrong = []
    with contextlib.ExitStack() as stack:
        base, root = arguments.directory, ""
        if arguments.far != "disk":
            (folder := base / "server").mkdir()
            stack.callback(shutil.rmtree, folder)
            os.environ.update(stack.enter_context(servers.server(arguments.far, folder)))
            root = servers.ROOTS[arguments.far]
        for number, seed in enumerate(range(arguments.seed, arguments.seed + arguments.rounds), 1):
            try:
                run_round(seed, base, root, outcomes)
            except (WrongError, OSError, LookupError, ValueError):
                wrong.append(seed)
            if root == servers.ROOTS["localbucket"]:
                for left in (base / "server" / "bucket").glob("round-*"):
                    shutil.rmtree(left)
            outcomes["rounds"] += 1
            if number % SHOWN == 0:
                print(dict(outcomes), "wrong:", wrong, flush=True)
    print(*(f"{count:8} {outcome}" for outcome, count in sorted(outcomes.items())), sep="\n")
    print(f"seeds that showed defects: {wrong}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
