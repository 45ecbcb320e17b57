"""Restores, or compares, what the arguments of a call ask for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from datastates._base import log
from datastates.commit import newest
from datastates.executor.executor import Executor
from datastates.executor.timeline import TRAINING_THREAD, Span
from datastates.reading.tensors import Tensors
from datastates.restoring import newest_whole
from datastates.restoring.meeting import Meeting
from datastates.restoring.request import RestoreRequest
from datastates.restoring.restore import Restore
from datastates.restoring.restored import Comparison, Restored
from datastates.state.provider import StateProvider, refuse_path
from datastates.storage.location import Location

Origin = newest.Given | Callable[[Meeting, RestoreRequest], Tensors]
"""Checkpoints of this package, or a function that opens a checkpoint of another format on all ranks."""


def restore(
    origin: Origin,
    providers: Sequence[StateProvider],
    options: Mapping[str, Any],
    meetings: Callable[[int], Meeting],
    executor: Callable[[int], Executor],
    *,
    wait: Callable[[], None] = lambda: None,
    prove: Callable[[], None] = lambda: None,
) -> Restored | None:
    """Restore; the common part of :func:`datastates.restore` and :meth:`datastates.Checkpointer.restore`.

    Args:
        origin: What is restored from.
        providers: The state to restore.
        options: Fields of a :class:`~datastates.restoring.request.RestoreRequest`, as the user gave them.
        meetings: Returns the meeting of the n-th attempt, from 0.
        executor: Returns the executor to use, given the number of bytes that will be read.
        wait: Waits until the state may change, as the gate does; called before a checkpoint is chosen.
        prove: Called on the coordinator before a checkpoint is looked for; raises StorageError to refuse the directory.

    Returns:
        The result; None if there is no checkpoint, or none of the wanted step.
    """
    begin = time.monotonic()
    providers, request = _checked(providers, options, meetings(0))
    wait()
    if isinstance(origin, newest.Given):
        place = origin

        def candidates() -> list[Location]:
            prove()
            return newest.candidates(place, request.step, certain=not request.fallback)

        restored = newest_whole.restore(providers, place.tier, candidates, executor, meetings, request)
    else:
        meeting = meetings(0)
        restored = Restore(origin(meeting, request), providers, executor, meeting, request).run()
    if restored is not None:
        restored.spans.insert(0, Span("open", TRAINING_THREAD, begin, restored.spans[0].begin, 0))
        log.info("%s", restored.report)
    return restored


def compare(
    origin: Origin,
    providers: Sequence[StateProvider],
    options: Mapping[str, Any],
    meeting: Meeting,
    executor: Callable[[int], Executor],
) -> Comparison | None:
    """Compare the checkpoint with the state, without restoring; arguments and errors as for :func:`restore`."""
    providers, request = _checked(providers, {**options, "strict": False}, meeting)
    if not isinstance(origin, newest.Given):
        return Restore(origin(meeting, request), providers, executor, meeting, request).compare()
    candidates = partial(newest.candidates, origin, request.step, certain=True)
    return newest_whole.compare(providers, origin.tier, candidates, executor, meeting, request)


def _checked(
    providers: Sequence[StateProvider], options: Mapping[str, Any], meeting: Meeting
) -> tuple[Sequence[StateProvider], RestoreRequest]:
    """The checked providers and request. If they are wrong, the other ranks hear of it before the error is raised."""
    try:
        refuse_path(providers)
        # a generator's providers are gone through more than once
        kept = list(providers) if isinstance(providers, Iterator) else providers
        return kept, RestoreRequest.of(options)
    except Exception as error:
        meeting.refuse(error)
