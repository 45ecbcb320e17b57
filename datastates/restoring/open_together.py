"""Opens one checkpoint on all ranks: the coordinator chooses it, and all protect it from deletion."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from datastates.commit import health, manifest
from datastates.commit.tier import ReadableTier
from datastates.reading.stored import Head, Stored
from datastates.restoring.meeting import Meeting
from datastates.restoring.request import RestoreRequest
from datastates.storage.location import Location


def advised(tier: ReadableTier, path: Location, request: RestoreRequest) -> contextlib.AbstractContextManager[None]:
    """Let an error about a damaged newest checkpoint name an older checkpoint that looks whole.

    It does nothing if the user asked for a step.
    """
    how = "take it with step={step}, or let fallback=True do it" if request.step is None else None
    return health.advice(tier, path, how)


def open_together(
    meeting: Meeting,
    request: RestoreRequest,
    tier: ReadableTier,
    find: Callable[[], Location | None],
    reading: contextlib.ExitStack,
) -> Stored | None:
    """Open the checkpoint that the coordinator finds, on all ranks, and protect it from deletion.

    Args:
        meeting: The meeting of the ranks.
        request: The request of this rank. All ranks raise an error if their requests differ.
        tier: The tier of the checkpoint.
        find: Called on the coordinator. Returns the path of the checkpoint, or None.
        reading: The protection ends when this stack is closed.

    Returns:
        The checkpoint; None if ``find`` returned None. If a rank other than the coordinator cannot protect it, the next
        stage of the meeting fails.
    """

    def pick() -> bytes:
        if (path := tier.keep(find, reading)) is None:
            return b""
        with advised(tier, path, request):
            return Head.of(path, manifest.open(path)).encode()

    head = meeting.choose(request.wish, pick)
    if not head:
        return None
    stored = Stored(Head.decode(head))

    def keep() -> None:
        if meeting.rank:
            tier.keep(lambda: stored.head.path, reading)

    meeting.begin(keep)
    return stored
