"""Trains with a function of the program that raises: in turn each function, each kind of error, and each call of it.

The argument is a directory. Each round asserts that all steps are done, that every snapshot has the right outcome, and
that the error is told. It prints a line before that, so that the last line names a round that hangs.
"""

from __future__ import annotations

import errno
import io
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import datastates as ds
from datastates import _native
from datastates.adapters.metrics.tensorboard import TensorBoardMetrics
from datastates.commit import newest
from datastates.commit.tiers import tier_of
from datastates.providers import HostTensorProvider
from datastates.state.provider import StateProvider
from datastates.state.shards import Shard, object_shard

FAILS = 3
"""The step whose snapshot fails, so that its failure is told, too."""
STEPS = 5
MOST = 5
"""Calls of a plug of which each raises alone. A metrics sink has several at each commit."""


class _Stop(BaseException):
    """As a KeyboardInterrupt, which a program's own function raises."""


class _NoText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("this error has no text")


class _Frozen(Exception):
    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name} cannot be set")


KINDS = (ConnectionError, SystemExit, _Stop, _NoText, _Frozen)
LOGS = ("handler", "filter", "record factory")
CALLS = ("on_commit", "on_error", "metrics")
PLUGS = (*LOGS, *CALLS, "handler and standard error", "serialize", "encode", "hooks", "audit hook")


class Plug:
    """Raises at its ``nth`` call, or at each if that is 0."""

    def __init__(self, kind: type[BaseException], nth: int) -> None:
        self.kind, self.nth, self.calls = kind, nth, 0

    def __call__(self, *_: object, **__: object) -> Any:
        self.calls += 1
        if self.nth in (0, self.calls):
            raise self.kind("of the plug")
        return True


class _InBackground(StateProvider):
    """An object that is serialized in the background, and encoded there."""

    def __init__(self, serialize: Plug | None = None, encode: Plug | None = None) -> None:
        super().__init__("object")
        self._calls = serialize, encode

    def shards(self) -> Sequence[Shard]:
        return [object_shard(lazy=True)]

    def serialize(self, shard: Shard) -> Any:
        del shard
        serialize, encode = self._calls
        if serialize is not None:
            serialize()

        def encoded(*_: object) -> bytes:
            if encode is not None:
                encode()
            return ds.dumps({"a": 1})

        return encoded


class _Handler(logging.Handler):
    def __init__(self, call: Callable[..., object]) -> None:
        super().__init__()
        self.emit = call  # type: ignore[assignment]


class _Stream:
    """A standard error that raises."""

    def __init__(self, call: Callable[..., object]) -> None:
        self.write = self.flush = call


@contextmanager
def set_to(owner: Any, name: str, value: object) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


_hooks: list[Plug] = []
"""Called by the audit hook, which cannot be taken away."""


def _audit(event: str, words: object) -> None:
    if _hooks and event == "open" and threading.current_thread().name.startswith("datastates"):
        _hooks[0](event, words)


def plugged(name: str, plug: Plug, stack: ExitStack) -> tuple[dict[str, Any], StateProvider]:
    """Plug it in; returns options of the checkpointer, and an object of the state."""
    logger = logging.getLogger("datastates")
    logger.setLevel(logging.DEBUG)
    options: dict[str, Any] = {"on_error": "warn"}
    state = _InBackground()
    if name in ("handler", "handler and standard error"):
        handler = _Handler(plug)
        logger.addHandler(handler)
        stack.callback(logger.removeHandler, handler)
        if name == "handler and standard error":
            stack.enter_context(set_to(sys, "stderr", _Stream(plug)))
    elif name == "filter":
        logger.addFilter(plug)
        stack.callback(logger.removeFilter, plug)
    elif name == "record factory":
        stack.callback(logging.setLogRecordFactory, logging.getLogRecordFactory())
        logging.setLogRecordFactory(lambda *a, **o: (plug(), logging.LogRecord(*a, **o))[1])
    elif name == "on_commit":
        options["on_commit"] = plug
    elif name == "on_error":
        options["on_error"] = plug
    elif name == "metrics":
        writer = type("Writer", (), {"add_scalar": plug})()
        options["on_commit"] = TensorBoardMetrics(writer)
    elif name == "serialize":
        state = _InBackground(serialize=plug)
    elif name == "encode":
        state = _InBackground(encode=plug)
    elif name == "hooks":
        # beside a callback that raises, so that there is something to hook
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("error")
        for owner, hook in (
            (sys, "excepthook"),
            (threading, "excepthook"),
            (sys, "unraisablehook"),
            (warnings, "showwarning"),
        ):
            stack.enter_context(set_to(owner, hook, plug))
        options["on_commit"] = Plug(plug.kind, 0)
    elif name == "audit hook":
        _hooks.append(plug)
        stack.callback(_hooks.clear)
    else:
        raise ValueError(name)
    return options, state


def train(root: Path, name: str, plug: Plug) -> list[ds.Snapshot | None]:
    """Train and save at each step; returns the snapshots, None where the call itself has raised."""
    array, taken = np.zeros(1000), list[ds.Snapshot | None]()
    with ExitStack() as stack:
        options, state = plugged(name, plug, stack)
        ckpt = ds.Checkpointer(root, host_cache="4MiB", block="1MiB", **options)
        for step in range(1, STEPS + 1):
            ckpt.gate()
            array[:] = step
            if step == FAILS:
                _native.arm_fault("sync", "fail", errno.EIO, 1, 1)
            try:
                taken.append(ckpt.snapshot([HostTensorProvider("model", {"a": array}), state], step=step))
                ckpt.wait()
            except (SystemExit, _Stop):  # interrupts, in a line that this call has logged
                taken.append(None)
        ckpt.wait()
        _native.clear_faults()
        while True:
            try:
                ckpt.close()
                break
            except (SystemExit, _Stop):
                pass
        assert [t.name for t in threading.enumerate() if t.name.startswith("datastates")] == []
    return taken


def rounds(root: Path, name: str, kind: type[BaseException]) -> None:
    """Let the plug raise at each of its calls, then only at the first, the second, and so on."""
    nth = calls = 0
    while nth <= min(calls, MOST):
        print(name, kind.__name__, nth, flush=True)
        at, plug, told = root / name / kind.__name__ / str(nth), Plug(kind, nth), io.StringIO()
        with set_to(sys, "stderr", told):
            taken = train(at, name, plug)
        calls = plug.calls
        assert len(taken) == STEPS
        if nth == 0 and name in LOGS and issubclass(kind, Exception):
            assert f"snapshot {FAILS} failed" in told.getvalue()
        if nth == 0 and name in CALLS:
            assert kind.__name__ in told.getvalue()
        committed = newest.committed(tier_of(at))
        for step, snapshot in enumerate(taken, 1):
            if snapshot is not None:
                assert snapshot.committed == (step in committed), (step, snapshot)
                assert snapshot.committed or snapshot.exception() is not None, (step, snapshot)
                if name not in ("serialize", "encode", "audit hook"):
                    assert snapshot.committed == (step != FAILS), (step, snapshot.exception())
        for step, path in committed.items():
            assert np.array_equal(ds.load(path)["model"]["a"], np.full(1000, step, np.float64))
        nth += 1


if __name__ == "__main__":
    sys.addaudithook(_audit)
    for name in PLUGS:
        for kind in KINDS:
            rounds(Path(sys.argv[1]), name, kind)
    print("all rounds have ended")
