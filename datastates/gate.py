"""The consistency gate: one process-wide hook before every torch optimizer's step."""

from __future__ import annotations

import sys
import threading
import weakref
from typing import Any

from datastates.futures import Snapshot

_pending: weakref.WeakSet[Snapshot] = weakref.WeakSet()
_lock = threading.Lock()
_hook: Any = None


def guard(snapshot: Snapshot) -> None:
    """Let every optimizer step wait for this snapshot's capture, from now on until it is captured."""
    global _hook
    with _lock:
        _pending.add(snapshot)
        if _hook is None and "torch" in sys.modules:
            from torch.optim.optimizer import register_optimizer_step_pre_hook

            _hook = register_optimizer_step_pre_hook(_before_step)


def _before_step(*_: Any) -> None:
    if not _pending:
        return
    with _lock:
        snapshots = list(_pending)
    for snapshot in snapshots:
        snapshot.pass_gate()
        if snapshot.captured or snapshot.ended:
            with _lock:
                _pending.discard(snapshot)
