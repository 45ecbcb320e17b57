"""The lines in the lock file of a partial directory: who writes there. No I/O.

A lock that can be taken does not prove that its holder is gone: file systems exist where a lock on one mount is not
seen on another, though each lock succeeds. So every writer leaves a line of its own.
"""

from __future__ import annotations

from typing import NamedTuple

from datastates._base.process import own_name


class Writer(NamedTuple):
    """One line.

    Attributes:
        number: The number of the writer's opening; 0 without one.
        owner: The random name of the process that opened; ``-`` without an opening.
        process: The name of the writer's process; empty in a line of an earlier version.
    """

    number: int
    owner: str
    process: str


def line(mark: bytes | None) -> bytes:
    """The line of this process. ``mark`` is that of its opening, empty or None without one."""
    return b" ".join([mark or b"0 -", own_name().encode()]) + b"\n"


def decode(data: bytes) -> list[Writer]:
    """All lines of a lock file. A line that says nothing becomes a writer that nobody knows."""
    found = []
    for text in data.decode(errors="replace").splitlines():
        number, owner, named = [*text.split(), "", "", ""][:3]
        found.append(Writer(int(number) if number.isdecimal() and len(number) < 20 else 0, owner, named))
    return found
