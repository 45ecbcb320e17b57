"""Two ranks, of which signals interrupt one in turn at random times. Both must be able to go on each time.

    interrupting_ranks.py DIRECTORY SECONDS

A line per fault is written to standard output. A hang ends the program, with the stacks on standard error.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch.distributed as dist

import datastates as ds
from datastates.providers import HostTensorProvider, ReplicatedProvider, from_state_dict

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from interrupts import Interrupt

OPTIONS: dict[str, Any] = {"host_cache": "2MiB", "block": "1MiB", "io_threads": 1, "keep_last": 2}
HANG_SECONDS = 120
IMPATIENT, PATIENT = 0.5, 100.0
"""Values of ``rank_timeout``: where a rank may be missing, and where it may only be slow."""


def providers(step: int) -> list[Any]:
    """A state that tells its step."""
    return [
        HostTensorProvider(f"own{RANK}", {"a": np.full(3000, step)}),
        ReplicatedProvider(HostTensorProvider("alike", {"b": np.full(50_000, step)})),
        from_state_dict("rest", {"step": step}),
    ]


def session(step: int, rank_timeout: float) -> None:
    """Open, save, restore and close."""
    with ds.Checkpointer(ROOT, rank_timeout=rank_timeout, **OPTIONS) as ckpt:
        ckpt.snapshot(providers(step), step=step).wait_committed()
        back = providers(0)
        restored = ckpt.restore(back)
        assert restored is not None
        found = [restored.step, *(int(array[0]) for one in back[:1] for array in one.tensors().values())]
        assert found == [step, step], (found, step)


@contextlib.contextmanager
def interrupted(seconds: float) -> Iterator[None]:
    """Raise Interrupt in the block after so many seconds, and leave it."""
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except Interrupt as error:
        trace, place = error.__traceback__, ""
        while trace is not None and trace.tb_next is not None:
            place = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
            trace = trace.tb_next
        del trace  # it keeps what the call held
        print(f"interrupted at {place}", file=sys.stderr)


def half_interrupted(step: int, after: float | None) -> None:
    """A session which one rank leaves after so many seconds; the other one waits for it, and gives up."""
    with contextlib.suppress(ds.DatastatesError), contextlib.nullcontext() if after is None else interrupted(after):
        session(step, IMPATIENT)


def handle(number: int, frame: FrameType | None) -> None:
    raise Interrupt


def together(call: Callable[[], object]) -> None:
    """Make a call on both ranks, between two barriers."""
    dist.barrier()
    call()
    dist.barrier()


def left() -> list[str]:
    """Partial folders, and the threads of this package."""
    gc.collect()
    names = [path.name for path in ROOT.iterdir() if ".partial-" in path.name]
    return sorted([*names, *(t.name for t in threading.enumerate() if t.name.startswith("datastates"))])


def settled(before: list[str]) -> list[str]:
    """What is left beyond ``before``, once threads that are ending have ended."""
    end = time.monotonic() + 10
    while more := list((collections.Counter(left()) - collections.Counter(before)).elements()):
        if time.monotonic() > end:
            break
        time.sleep(0.01)
    return more


def main() -> None:
    signal.signal(signal.SIGALRM, handle)
    end, steps, before = time.monotonic() + float(sys.argv[2]), 0, list[str]()
    seed = random.Random(os.environ["MASTER_PORT"]).randrange(1 << 30)
    rng, took = random.Random(seed), 0.1  # the same numbers on both ranks
    while True:
        steps += 1
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        begin = time.monotonic()
        together(partial(session, steps, PATIENT))
        took = time.monotonic() - begin
        if more := settled(before):
            print(f"seed {seed}, step {steps}: left: {more}", flush=True)
        goes_on = [time.monotonic() < end]
        dist.broadcast_object_list(goes_on, src=0)
        if not goes_on[0]:
            break
        steps += 1
        victim, after = steps // 2 % 2, rng.uniform(1e-6, 1.1 * took)
        together(partial(half_interrupted, steps, after if victim == RANK else None))
    print(f"{steps} steps", file=sys.stderr)
    sys.stdout.flush()
    os._exit(0)  # threads of torch that are left abort a process at times that ends by itself


dist.init_process_group("gloo")
RANK, ROOT = dist.get_rank(), Path(sys.argv[1])
main()
