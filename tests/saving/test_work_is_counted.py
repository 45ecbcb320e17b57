"""The work of a repeated snapshot, of a restore and of a load is counted, so that none grows unseen. No clock is read.

Counted are calls of this package's functions, of the native core, and of the system on files; and spans and threads
that are made. They are the same in each run, on fast and on slow machines. Comprehensions are not counted, as only some
versions of Python make a call of each.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import datastates as ds
from datastates.executor.timeline import Span
from datastates.providers import from_state_dict, from_stateful
from datastates.state.provider import StateProvider

torch = pytest.importorskip("torch")

# fmt: off
TABLE: dict[str, dict[str, dict[str, int]]] = {
    "one tensor": {
        "snapshot": {
            "_base": 12, "checkpointer": 3, "commit": 5, "executor": 3, "native": 2,
            "others calls": 878, "others files": 70, "others native": 43, "providers": 16, "ranks": 4,
            "saving": 47, "schedule": 2, "state": 25, "storage": 2,
        },
        "restore": {
            "_base": 70, "checkpointer": 3, "commit": 35, "container": 169, "errors": 24,
            "executor": 111, "files": 18, "native": 15, "planning": 47, "providers": 24, "ranks": 8,
            "reading": 101, "restoring": 131, "saving": 6, "state": 224, "storage": 100,
        },
        "load": {
            "_base": 108, "api": 1, "commit": 40, "config": 8, "container": 171, "errors": 34,
            "executor": 14, "files": 20, "formats": 20, "native": 13, "planning": 47, "reading": 109, "state": 162,
            "storage": 127,
        },
    },
    "400 tensors, from_stateful": {
        "snapshot": {
            "_base": 13, "checkpointer": 3, "commit": 5, "executor": 3, "native": 4,
            "others calls": 8502, "others files": 70, "others native": 44, "providers": 31, "ranks": 4,
            "saving": 52, "schedule": 2, "state": 43, "storage": 2,
        },
        "restore": {
            "_base": 1905, "checkpointer": 5, "commit": 37, "container": 592, "errors": 36,
            "executor": 121, "files": 31, "native": 20, "planning": 49, "providers": 5279, "ranks": 11,
            "reading": 528, "restoring": 1106, "saving": 5, "state": 7940, "storage": 124,
        },
        "load": {
            "_base": 908, "api": 1, "commit": 40, "config": 8, "container": 2193, "errors": 44,
            "executor": 14, "files": 26, "formats": 20, "native": 16, "planning": 47, "reading": 4106,
            "state": 7141, "storage": 143,
        },
    },
    "400 tensors, from_state_dict of functions": {
        "snapshot": {
            "_base": 14, "checkpointer": 3, "commit": 5, "executor": 3, "native": 4,
            "others calls": 8502, "others files": 70, "others native": 44, "providers": 32, "ranks": 4,
            "saving": 52, "schedule": 2, "state": 46, "storage": 2,
        },
        "load": {
            "_base": 908, "api": 1, "commit": 40, "config": 8, "container": 2193, "errors": 44,
            "executor": 14, "files": 26, "formats": 20, "native": 16, "planning": 47, "reading": 4106,
            "state": 7141, "storage": 143,
        },
    },
    "100 nested NumPy arrays": {
        "snapshot": {
            "_base": 1424, "checkpointer": 3, "commit": 5, "executor": 4, "native": 5,
            "others calls": 3092, "others files": 70, "others native": 43, "providers": 1030, "ranks": 4,
            "saving": 759, "schedule": 2, "state": 6437, "storage": 2,
        },
        "restore": {
            "_base": 1216, "checkpointer": 5, "commit": 37, "container": 1161, "errors": 30,
            "executor": 121, "files": 25, "native": 14, "planning": 48, "providers": 1029, "ranks": 11,
            "reading": 721, "restoring": 630, "saving": 5, "state": 7329, "storage": 109,
        },
        "load": {
            "_base": 306, "api": 1, "commit": 40, "config": 8, "container": 671, "errors": 34,
            "executor": 14, "files": 20, "formats": 20, "native": 13, "planning": 47, "reading": 1099,
            "state": 2346, "storage": 127,
        },
    },
}
# fmt: on
"""For each state and operation: the calls of functions on the calling thread, by package; and what else was counted.

``native`` counts calls of the native core, ``files`` calls of the system on files, ``spans`` and ``threads`` what was
made. With ``others`` before the name they are those of other threads, where ``calls`` counts all functions.
"""
MORE = 1.1
"""A count may be so much higher than in the table."""
FEW = 3
"""So much may be added to a low count."""
UNSEEN = 20 if sys.version_info >= (3, 12) else 0
"""So many calls of functions in C does Python 3.11 not tell of, for which the table is, and newer ones do."""

_PACKAGE = str(Path(ds.__file__).parent)
_HOOKS = tuple(str(Path(_PACKAGE, package)) for package in ("adapters", "files"))
"""What another test has hooked into calls of the system stays for the rest of the process."""
_STORAGE = {
    *("close", "fdatasync", "fstat", "fstatvfs", "fsync", "ftruncate", "link", "listdir", "lstat", "mkdir", "open"),
    *("open_descriptor", "pread", "preadv", "pwrite", "pwritev", "read", "readlink", "rename", "rmdir", "scandir"),
    *("stat", "statvfs", "symlink", "truncate", "unlink", "utime", "write", "flock", "posix_fadvise", "lockf"),
}
_COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>"}
_WAITING = ("_base/waiting.py", "_base/workers.py", "ranks/polling.py")
"""The files whose calls on other threads depend on how long these wait."""


class Work:
    """Counts the work of a block on the thread that enters it, and meanwhile that of threads started after it."""

    def __init__(self) -> None:
        self.functions: Counter[str] = Counter()  # by file and name, with "others " before them on other threads
        self.counts: Counter[str] = Counter()
        self._main = threading.get_ident()
        self._counting = False

    def profile(self, frame: FrameType, event: str, arg: Any) -> None:
        """The profile function of all threads."""
        if not self._counting:
            return
        others = "" if threading.get_ident() == self._main else "others "
        if event == "c_call":
            module = getattr(arg, "__module__", "") or ""
            if module == "datastates._native":
                self.counts[f"{others}native"] += 1
            if module in ("posix", "fcntl", "datastates._native", "_io") and arg.__name__ in _STORAGE:
                self.counts[f"{others}files"] += 1
        elif event == "call":
            code = frame.f_code
            if code.co_name == "__new__" and frame.f_locals.get("_cls") is Span:
                self.counts[f"{others}spans"] += 1
            elif code.co_filename.startswith(_HOOKS):
                return
            elif code.co_filename.startswith(_PACKAGE) and code.co_name not in _COMPREHENSIONS:
                file = code.co_filename[len(_PACKAGE) + 1 :]
                if others and file in _WAITING:
                    return
                self.functions[f"{others}{file} {code.co_name}"] += 1
                self.counts[f"{others}calls" if others else file.split("/")[0].removesuffix(".py")] += 1
            elif code.co_filename == threading.__file__ and code.co_name == "start":
                self.counts["threads"] += 1

    @contextlib.contextmanager
    def counted(self, *, others: Callable[[], object] = lambda: None) -> Iterator[None]:
        """Count a block on this thread, and then the rest on other threads until ``others`` returns."""
        gc.collect()
        gc.disable()
        self._counting = True
        sys.setprofile(self.profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            others()
            self._counting = False
            gc.enable()


@pytest.fixture
def work() -> Iterator[Work]:
    made = Work()
    threading.setprofile(made.profile)
    yield made
    threading.setprofile(None)  # type: ignore[arg-type]


def one_tensor() -> list[StateProvider]:
    return [from_state_dict("state", {"weight": torch.ones(64)})]


def model_and_optimizer() -> tuple[Any, Any]:
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(50)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def stateful() -> list[StateProvider]:
    model, optimizer = model_and_optimizer()
    return [from_stateful("model", model), from_stateful("optimizer", optimizer)]


def functions() -> list[StateProvider]:
    model, optimizer = model_and_optimizer()
    return [from_state_dict("model", model.state_dict), from_state_dict("optimizer", optimizer.state_dict)]


def nested_arrays() -> list[StateProvider]:
    layers = [{"weight": np.full(4, float(i)), "number": i} for i in range(100)]
    return [from_state_dict("state", {"layers": layers})]


STATES: dict[str, Callable[[], list[StateProvider]]] = {
    "one tensor": one_tensor,
    "400 tensors, from_stateful": stateful,
    "400 tensors, from_state_dict of functions": functions,
    "100 nested NumPy arrays": nested_arrays,
}


def settle(checkpointer: ds.Checkpointer) -> None:
    """Wait until the engine's threads have nothing to do."""
    checkpointer.wait()
    for workers in (checkpointer._engine._pool, checkpointer._engine._teller):
        workers.wait_done()


def compare(found: Work, state: str, operation: str) -> None:
    """Fail if more was counted than the table says, and say of what."""
    known = TABLE.get(state, {}).get(operation, {})
    in_c = {name: UNSEEN for name in found.counts if name.endswith(("files", "native"))}
    least = {name: known.get(name, 0) + in_c.get(name, 0) for name in found.counts}
    more = {name: n for name, n in found.counts.items() if n > max(least[name] * MORE, least[name] + FEW)}
    total, before = (sum(counts.values()) for counts in (found.counts, known))
    if not more and total <= max(before * MORE, before + FEW) + sum(in_c.values()):
        return
    lines = [f"{name}: {known.get(name, 0)} -> {n}" for name, n in more.items()]
    grown = [
        f"  {n:6} x {name}"
        for name, n in found.functions.most_common()
        if any(name.startswith(f"{package}/") or name.startswith(f"{package}.py") for package in more)
        or (name.startswith("others ") and "others calls" in more)
    ]
    pytest.fail(
        f"{operation} of {state} does more than before: {total} instead of {before}\n"
        + "\n".join([*lines, *grown[:40], f"all counts: {dict(sorted(found.counts.items()))}"])
    )


@pytest.mark.parametrize("state", STATES)
def test_a_repeated_snapshot(state: str, tmp_path: Path, work: Work) -> None:
    providers = STATES[state]()
    with ds.Checkpointer(tmp_path, keep_last=1, host_cache="128MiB") as checkpointer:
        for step in range(3):
            checkpointer.snapshot(providers, step=step).wait_committed()
            settle(checkpointer)
        with work.counted(others=lambda: settle(checkpointer)):
            checkpointer.snapshot(providers, step=3)
    compare(work, state, "snapshot")


@pytest.mark.parametrize("state", STATES)
def test_a_restore(state: str, tmp_path: Path, work: Work) -> None:
    if "functions" in state:
        pytest.skip("only arrays can be restored into what functions return")
    providers = STATES[state]()
    with ds.Checkpointer(tmp_path, host_cache="128MiB") as checkpointer:
        checkpointer.snapshot(providers, step=1).wait_committed()
        settle(checkpointer)
        checkpointer.restore(providers)
        with work.counted():
            checkpointer.restore(providers)
    compare(work, state, "restore")


@pytest.mark.parametrize("state", STATES)
def test_a_load(state: str, tmp_path: Path, work: Work) -> None:
    with ds.Checkpointer(tmp_path, host_cache="128MiB") as checkpointer:
        checkpointer.snapshot(STATES[state](), step=1).wait_committed()
    ds.load(tmp_path)
    with work.counted():
        ds.load(tmp_path)
    compare(work, state, "load")
