"""A program that interrupts one public call at each of its instructions in turn, and looks what every interrupt leaves.

    interrupting.py DIRECTORY CALL [--seconds SECONDS] [--signals SECONDS]

Each line of this package, and of the standard library below it, is one place; with ``--seconds``, lines are taken at
random until the time is over. With ``--signals`` a place is whatever a timer hits. A line per fault is written to
standard output, and the exit status is then 1. A hang ends the program, with the stacks on standard error.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import faulthandler
import gc
import itertools
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import datastates as ds
from datastates.providers import HostTensorProvider, from_state_dict

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from interrupts import Interrupt, Tracer

OPTIONS: dict[str, Any] = {"host_cache": "2MiB", "block": "1MiB", "io_threads": 1}
HANG_SECONDS = 30
PACKAGE = str(Path(ds.__file__).parent)


def providers(step: int) -> list[Any]:
    """A state that tells its step."""
    return [
        HostTensorProvider("model", {"a": np.full(3000, step), "b": np.full(2, step)}),
        from_state_dict("rest", {"step": step}),
    ]


def value_of(given: list[Any]) -> tuple[int, ...]:
    """What the arrays of a state say."""
    loaded = {name: int(array[0]) for name, array in given[0].tensors().items()}
    return tuple(loaded.values())


# --- the calls


class Calls:
    """A checkpointer, and calls to interrupt. Each returns what undoes it, if it ended after all."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.steps = itertools.count(1)
        self.ckpt = ds.Checkpointer(root / "many", keep_last=1, **OPTIONS)
        self.ckpt.snapshot(providers(0), step=0).wait_committed()
        ds.snapshot(providers(0), root / "one", **OPTIONS).wait_committed()
        self.closes = False
        self.kept: Any = None
        self.wait_for_kept: Callable[[], object] = lambda: None
        self.made = root / "made"
        self.made.mkdir()

    def snapshot(self) -> object:
        return self.ckpt.snapshot(providers(7), step=next(self.steps))

    def gate(self) -> object:
        return self.ckpt.gate()

    def wait(self) -> object:
        return self.ckpt.wait()

    def wait_committed(self) -> object:
        return self.ckpt.snapshot(providers(7), step=next(self.steps)).wait_committed()

    def restore(self) -> object:
        return self.ckpt.restore(providers(9))

    def steps_and_latest(self) -> object:
        return self.ckpt.steps(), self.ckpt.latest()

    def checkpointer(self) -> object:
        with ds.Checkpointer(self.root / "other", **OPTIONS) as other:
            return other.snapshot(providers(7), step=next(self.steps))

    def close(self) -> object:
        self.closes = True
        self.ckpt.snapshot(providers(7), step=next(self.steps))
        return self.ckpt.close()

    def one_snapshot(self) -> object:
        return ds.snapshot(providers(7), self.made / str(next(self.steps)), **OPTIONS).wait_committed()

    def one_restore(self) -> object:
        return ds.restore(providers(9), self.root / "one", **OPTIONS)

    def compare(self) -> object:
        return ds.compare(providers(9), self.root / "one", **OPTIONS)

    def load(self) -> object:
        return ds.load(self.root / "one", framework="np", **OPTIONS)

    def open(self) -> object:
        with ds.open(self.root / "one", framework="np", **OPTIONS) as opened:
            return [opened[key] for key in opened]

    def export(self) -> object:
        return ds.export(self.root / "one", self.made / f"{next(self.steps)}.safetensors", **OPTIONS)

    # --- adapters

    def tool(self, make: Callable[[], tuple[Any, Callable[[], object]]]) -> Any:
        """What an adapter keeps, made once; ``make`` also returns what waits for its work."""
        if self.kept is None:
            self.kept, self.wait_for_kept = make()
        return self.kept

    def lightning(self) -> object:
        import torch

        from datastates.adapters.lightning import DataStatesCheckpointIO

        def make() -> tuple[Any, Callable[[], object]]:
            io = DataStatesCheckpointIO(**OPTIONS)
            return io, io.files.wait

        state = {"state_dict": {"w": torch.full((20_000,), 7.0)}, "epoch": 1}
        return self.tool(make).save_checkpoint(state, self.made / f"{next(self.steps)}.ckpt")

    def folder(self) -> object:
        import torch

        from datastates.adapters.shared.folders import FolderCheckpoints
        from datastates.files.settings import FolderSettings
        from datastates.saving.snapshot import Snapshot

        def make() -> tuple[Any, Callable[[], object]]:
            folders = FolderCheckpoints(FolderSettings.of({"on_error": "warn", **OPTIONS}), "test")
            return folders, folders.wait

        def write(folder: Path, snapshots: list[Snapshot]) -> None:
            state = {"w": torch.full((20_000,), 7.0)}
            snapshots.append(folders.files.write("w", state, folder / "w.pt", lambda key, tensor: True))

        folders = self.tool(make)
        return folders.save(self.made / f"{next(self.steps)}", write)

    def dcp(self) -> object:
        import torch

        from datastates.adapters.dcp import DataStatesStorageWriter, async_save

        def make() -> tuple[Any, Callable[[], object]]:
            writer = DataStatesStorageWriter(**OPTIONS)
            return writer, lambda: writer.session._engine.wait() if writer.session else None  # type: ignore[attr-defined]

        state = {"w": torch.full((20_000,), 7.0)}
        return async_save(state, self.made / f"{next(self.steps)}", storage_writer=self.tool(make))

    # --- afterwards

    def clean(self) -> None:
        """Wait for what may have gone on, and remove it."""
        if self.closes:
            self.ckpt.close()
            self.ckpt = ds.Checkpointer(self.root / "many", keep_last=1, **OPTIONS)
        self.ckpt.wait()
        self.wait_for_kept()
        gc.collect()

    def faults(self) -> Iterator[str]:
        """What does not work any more."""
        self.ckpt.gate()
        step = next(self.steps)
        self.ckpt.snapshot(providers(step), step=step).wait_committed()
        back = providers(0)
        restored = self.ckpt.restore(back)
        if restored is None or restored.step != step or value_of(back) != (step, step):
            yield f"step {step} was not restored: {restored}"
        if not gc.isenabled():
            yield "the garbage collector is switched off"
            gc.enable()

    def things(self) -> dict[str, list[str]]:
        """Open files, partial folders and threads."""
        names = [str(path) for path in (*self.root.glob("*/*.partial-*"), *self.root.glob("*.partial-*"))]
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                names.append(os.readlink(f"/proc/self/fd/{fd}"))
        # started for a call that was interrupted, and idle: one more that finishes snapshots, one that tells the others
        idle = "datastates_1", "datastates-aside_0"
        threads = [t.name for t in threading.enumerate() if t.name not in idle]
        return {"files": sorted(names), "threads": sorted(threads)}


def settled(calls: Calls, before: dict[str, list[str]]) -> dict[str, list[str]]:
    """What is open and running now beyond ``before``, once threads that are ending have ended."""
    end = time.monotonic() + 5
    while True:
        now = calls.things()
        more = {k: list((collections.Counter(now[k]) - collections.Counter(before[k])).elements()) for k in now}
        if not any(more.values()) or time.monotonic() > end:
            return {k: v for k, v in more.items() if v}
        time.sleep(0.01)


def interrupted_at_lines(calls: Calls, call: Callable[[], object], seconds: float) -> Iterator[tuple[str, Any]]:
    """Interrupt a call at each line, or at random ones for some seconds; yields each place once the call was left."""
    counting = Tracer(sys.maxsize)
    with counting.tracing():
        call()
    calls.clean()
    lines = sys.maxsize - counting.left
    end = time.monotonic() + seconds
    for number in random.sample(range(lines), lines) if seconds else range(lines):
        tracer = Tracer(number)
        try:
            with tracer.tracing():
                call()
        except Interrupt:
            pass
        yield tracer.place or "not interrupted", number
        if seconds and time.monotonic() > end:
            return


def interrupted_by_signals(call: Callable[[], object], seconds: float) -> Iterator[tuple[str, Any]]:
    """Interrupt a call at random times; yields once the call has been left."""

    def handle(number: int, frame: FrameType | None) -> None:
        raise Interrupt

    signal.signal(signal.SIGALRM, handle)
    seed = random.randrange(1 << 30)
    rng, end, took = random.Random(seed), time.monotonic() + seconds, 0.05
    while time.monotonic() < end:
        begin, place = time.monotonic(), "not interrupted"
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, 1.1 * took))
                call()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            took = time.monotonic() - begin
        except Interrupt as error:
            trace = error.__traceback__
            while trace is not None and trace.tb_next is not None:
                place = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
                trace = trace.tb_next
            del trace  # it keeps what the call held
        yield place, seed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("call")
    parser.add_argument("--seconds", type=float, default=0)
    parser.add_argument("--signals", type=float, default=0)
    asked = parser.parse_args()
    faulthandler.enable()
    calls = Calls(asked.directory)
    call = getattr(calls, asked.call)
    for _ in range(3):  # what is imported and kept at first use
        call()
        calls.clean()
        assert list(calls.faults()) == []
    before = calls.things()
    count, faults = 0, 0
    trials = (
        interrupted_by_signals(call, asked.signals)
        if asked.signals
        else interrupted_at_lines(calls, call, asked.seconds)
    )
    for place, number in trials:
        count += 1
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        print(f"\r{number} {place}", file=sys.stderr)
        calls.clean()
        call()
        calls.clean()
        found = list(calls.faults())
        if more := settled(calls, before):
            found.append(f"more than before: {more}")
            before = calls.things()
        for fault in found:
            print(f"{number} {place}: {fault}", flush=True)
        faults += len(found)
        faulthandler.cancel_dump_traceback_later()
    calls.ckpt.close()
    if asked.call in ("snapshot", "wait_committed") and (left := [t.name for t in threading.enumerate()][1:]):
        print(f"threads after close(): {left}")
        faults += 1
    print(f"{count} interrupts of {asked.call}", file=sys.stderr)
    sys.exit(bool(faults))


main()
