"""What a path means to all ranks of a restore: checkpoints of this package, or one of another format."""

from __future__ import annotations

from functools import partial

from datastates.commit import newest
from datastates.errors import RestoreError
from datastates.formats import recognise
from datastates.formats.format import Format
from datastates.formats.seen import Seen
from datastates.reading.tensors import Tensors
from datastates.restoring.meeting import Meeting
from datastates.restoring.request import RestoreRequest
from datastates.restoring.requested import Origin
from datastates.storage.location import Location


def origin_of(seen: Seen) -> Origin:
    """What is restored from a path.

    Raises:
        FormatError: The path is of a format that is not read; the message names it.
        StorageError: It cannot be read.
    """
    if (kind := recognise.other(seen)) is not None:
        return partial(_open, kind, seen.path)
    return newest.given(seen.path, is_checkpoint=seen.has_manifest)


def _open(kind: Format, path: Location, meeting: Meeting, request: RestoreRequest) -> Tensors:
    """Open a checkpoint of another format on all ranks, which must request the same.

    Raises:
        CheckpointNotFoundError: It is of another step.
        FormatError, StorageError: As :meth:`Format.open` does.
        RestoreError: Another rank failed, or wants something else.
    """
    meeting.choose(request.wish, lambda: b"")
    opened = meeting.together("open", lambda: recognise.of_step(kind.open(path), path, request.step))
    found = f"{opened.format}, {opened.tensors.path}, step {opened.tensors.step}"

    def decide(told: dict[int, bytes]) -> bytes:
        if len(set(told.values())) > 1:
            said = "; ".join(f"rank {rank}: {text.decode()}" for rank, text in sorted(told.items()))
            raise RestoreError(f"the ranks have opened different checkpoints: {said}")
        return b""

    meeting.settle("opened", lambda: found.encode("utf-8", "backslashreplace"), decide)
    return opened.tensors
