"""The gate: a process-wide hook that lets every torch optimizer's step wait until snapshots are captured."""

from __future__ import annotations

import itertools
import sys
import time
import weakref
from collections import deque
from types import FrameType
from typing import Any

from datastates._base.loaded import loaded
from datastates.executor.timeline import STEP, TRAINING_THREAD, Span
from datastates.saving.snapshot import Snapshot, is_free, pass_gate
from datastates.saving.stale import Watch

MOST_STEPS = 16_384
"""Number of optimizer steps whose times are kept."""


class _Guarded(weakref.ref[Snapshot]):
    """A weak reference to a snapshot, with whether optimizers wait for it."""

    automatic: bool


# no lock guards this set, as a wait at the gate may be interrupted anywhere: each change is one operation
_pending: set[_Guarded] = set()
_hook: Any = None
_watches: list[weakref.ref[Watch]] = []  # replaced as a whole: optimizers of other threads go through it
_stepped: deque[float] = deque(maxlen=MOST_STEPS)
"""When the last optimizer steps began, on the monotonic clock."""


def guard(snapshot: Snapshot, *, automatic: bool) -> None:
    """Track a snapshot until it is captured. If ``automatic``, every optimizer step waits until then. Thread-safe."""
    global _hook
    guarded = _Guarded(snapshot, _pending.discard)
    guarded.automatic = automatic
    _pending.add(guarded)
    if automatic and _hook is None and loaded("torch") is not None:
        from torch._compile import _disable_dynamo
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        # a compiled step then runs the hook uncompiled, between two graphs; torch.compiler.disable imports Dynamo
        _hook = register_optimizer_step_pre_hook(_disable_dynamo(_before_step))


def watch(one: Watch) -> None:
    """Tell a watch of each optimizer step from now on, as long as somebody holds it."""
    global _watches
    _watches = [*(ref for ref in _watches if ref() is not None), weakref.ref(one)]


def pass_all(*, automatic_only: bool = False) -> None:
    """Wait at the gates of all snapshots of this process. Work that is enqueued afterwards may change the state.

    ``automatic_only``: wait only for the snapshots that were guarded with ``automatic=True``.
    """
    for guarded in list(_pending):
        snapshot = guarded()
        if snapshot is None or (automatic_only and not guarded.automatic):
            continue
        pass_gate(snapshot)
        if is_free(snapshot):
            _pending.discard(guarded)


def steps(since: float) -> list[Span]:
    """The times from one torch optimizer's ``step()`` to the next, of this process.

    Steps are seen from the first snapshot on that was guarded with ``automatic=True``. The oldest are forgotten.

    Args:
        since: The time on the monotonic clock from which on steps are given.
    """
    begun = [begin for begin in _stepped.copy() if begin >= since]
    return [Span(STEP, TRAINING_THREAD, begin, end, 0) for begin, end in itertools.pairwise(begun)]


def is_in_step() -> bool:
    """Whether this thread is inside a torch optimizer's ``step()``: in its hooks, in its closure, or in calls of these.

    The gate's hook has run by then. So this ``step()`` does not wait for a snapshot that is taken now.
    """
    torch: Any = loaded("torch")
    if torch is None:
        return False
    file = torch.optim.Optimizer.profile_hook_step.__code__.co_filename  # its wrapper is around each step()
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename != file:
        frame = frame.f_back
    return frame is not None


def _before_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _stepped.append(time.monotonic())
    for ref in _watches:
        if (one := ref()) is not None:
            one.note(optimizer)
    if not _pending:
        return None
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None or not type(optimizer).__module__.startswith("torch.optim."):
        pass_all(automatic_only=True)
        return None

    # torch's own optimizers change nothing before they have called the closure, which runs forward and backward
    def closure_and_gate() -> Any:
        value = closure()
        pass_all(automatic_only=True)
        return value

    if len(args) > 1:
        return (args[0], closure_and_gate, *args[2:]), kwargs
    return args, {**kwargs, "closure": closure_and_gate}
