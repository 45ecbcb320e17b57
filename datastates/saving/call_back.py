"""Calls the user's functions for snapshots that have ended."""

from __future__ import annotations

from datastates._base import log
from datastates.config import Settings
from datastates.saving.snapshot import Snapshot, error_of


def call_back(settings: Settings, snapshot: Snapshot) -> None:
    """Call ``on_error`` or ``on_commit`` of the settings for a snapshot that has ended; never raises an Exception."""
    call = settings.on_commit if error_of(snapshot) is None else settings.on_error
    if not callable(call):
        return
    snapshot.exception()  # it counts as delivered
    try:
        call(snapshot)
    except BaseException as error:  # an error in the user's function must not disturb training
        if not isinstance(error, Exception) and not log.is_own_thread():
            raise
        log.error("%r raised, called for %r", call, snapshot, of=error)
