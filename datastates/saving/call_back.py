"""Calls the user's functions for snapshots that have ended."""

from __future__ import annotations

import logging

from datastates.config import Settings
from datastates.saving.snapshot import Snapshot, course_of

_log = logging.getLogger("datastates")


def call_back(settings: Settings, snapshot: Snapshot) -> None:
    """Call ``on_error`` or ``on_commit`` of the settings for a snapshot that has ended; never raises an Exception."""
    course = course_of(snapshot)
    call = settings.on_commit if course.error is None else settings.on_error
    if not callable(call):
        return
    course.deliver()
    try:
        call(snapshot)
    except Exception:  # an error in the user's function must not disturb training
        _log.exception("%r raised, called for %r", call, snapshot)
