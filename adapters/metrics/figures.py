"""The figures of snapshots and restores that become metrics. Their names are stable."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from datastates.restoring.restored import Restored
from datastates.saving.snapshot import Snapshot

_IN_WORDS = {"s": "seconds", "By": "bytes", "By/s": "bytes_per_second"}


class Figure(NamedTuple):
    """One figure of each snapshot, or of each restore, on this rank.

    Attributes:
        of: ``snapshot`` or ``restore``.
        name: Its name among these.
        unit: ``s``, ``By`` for bytes, or ``By/s``.
        description: Its meaning, as a sentence.
    """

    of: str
    name: str
    unit: str
    description: str

    @property
    def path(self) -> str:
        """The name with its unit in words, for libraries whose metrics have no units."""
        return f"datastates/{self.of}/{self.name}_{_IN_WORDS[self.unit]}"


_SNAPSHOT: Mapping[Figure, Callable[[Any], float | None]] = {
    Figure("snapshot", "size", "By", "Bytes of the arrays of a committed snapshot."): lambda r: r.nbytes,
    Figure("snapshot", "stall", "s", "Time that training waited, in the call and at gates."): lambda r: r.stall_seconds,
    Figure("snapshot", "persist", "s", "Time from the call until on stable storage."): lambda r: r.persist_seconds,
    Figure("snapshot", "commit", "s", "Time from the call until committed."): lambda r: r.commit_seconds,
    Figure("snapshot", "rate", "By/s", "Size, by the time until on stable storage."): lambda r: _rate(r.persist_gbps),
}
_RESTORE: Mapping[Figure, Callable[[Any], float | None]] = {
    Figure("restore", "size", "By", "Bytes that were wanted of the files."): lambda r: r.nbytes,
    Figure("restore", "read", "By", "Bytes that were read."): lambda r: r.read_nbytes,
    Figure("restore", "duration", "s", "Duration of the call, with all waits."): lambda r: r.seconds,
    Figure("restore", "rate", "By/s", "Size, by the duration."): lambda r: _rate(r.gbps),
}
FIGURES = (*_SNAPSHOT, *_RESTORE)
"""All figures."""


def figures(done: Snapshot | Restored) -> dict[Figure, float]:
    """The figures of a committed snapshot or of a restore; rates are left out where there were no bytes.

    Raises:
        TypeError: ``done`` is neither, such as the None of a restore that found no checkpoint.
        ValueError: The snapshot is not committed.
    """
    if not isinstance(done, (Snapshot, Restored)):
        raise TypeError(f"metrics are of a Snapshot or a Restored, not of {done!r:.80}")
    if isinstance(done, Snapshot) and not done.committed:
        raise ValueError(f"{done!r} is not committed: give the metrics to Checkpointer(on_commit=...)")
    table = _SNAPSHOT if isinstance(done, Snapshot) else _RESTORE
    report = done.report
    values = {figure: value(report) for figure, value in table.items()}
    return {figure: float(value) for figure, value in values.items() if value is not None}


def _rate(gbps: float | None) -> float | None:
    return None if gbps is None else gbps * 1e9
