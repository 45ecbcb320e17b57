"""Names in a directory of checkpoints, and the lines in the lock file of a partial directory. No I/O.

A lock that can be taken does not prove that its holder is gone: file systems exist where a lock on one mount is not
seen on another, though each lock succeeds. So every writer leaves a line of its own.
"""

from __future__ import annotations

import hashlib
import math
import operator
import os
import re
import secrets
from typing import Any, NamedTuple, SupportsFloat

from datastates._base.process import own_name
from datastates.storage.location import Location

STEP = re.compile(r"step-([0-9]{8,18})(?:\.r([0-9]+)|\.([0-9a-f]{8}))?\Z")
"""Matches the name of a checkpoint: its step, and its revision in a directory, or its attempt in a store of objects."""
ENDED = ".ended"
"""Ends the name of the mark of a deletion in a store of objects."""
KEPT_FOLDER = re.compile(r"kept-[0-9]{8,18}\.[0-9a-f]{8}\Z")
"""Matches the name of a folder of kept containers in a store of objects: the step and the attempt that made them."""
BESIDE = re.compile(r"(step-[0-9]{8,18}\.[0-9a-f]{8})\.(ended|hold\.[0-9a-f]{16})\Z")
"""Matches what lies beside a checkpoint in a store of objects: the mark of its deletion, or a reader's hold."""
PASSING = re.compile(r"\.(?:now|trial)-[0-9a-f]{16}\Z")
"""Matches what a process makes for a moment only, in a store of objects."""
OF_ATTEMPT = re.compile(r"(?:rank-[0-9]{5,}|catalog)\.[0-9a-f]{8}\.[a-z]+\Z")
"""Matches the files of an attempt, besides its manifest, in a store of objects."""
UNFINISHED = re.compile(r"\.(?:rank-[0-9]{5,}(?:\.kept)?\.pt|catalog\.bin|manifest\.json)\.[0-9a-f]{8}\Z")
"""Matches what a process is copying into a partial directory."""
SAVING = re.compile(r"\.saving-([0-9]{1,18})\Z")
"""Matches the record of an opening that saves, in a store of objects."""
PARTIAL = re.compile(r"(.+)\.partial-[0-9a-f]{8}\Z", re.DOTALL)
LOCK = ".lock"
"""The file in a partial directory that its writers lock."""
HIDDEN = re.compile(r"\.")
"""The beginning of the names that :func:`hidden` gives."""
_LONGEST = 143
"""Most bytes of a file's name that every usual file system takes: eCryptfs takes the fewest."""
_KEPT = 100
"""Bytes of a too long name that are kept in the name of its partial directory."""


Metric = SupportsFloat | None
"""A metric as it is given: a number, also of NumPy or torch; None without one."""


def checked_step(step: Any) -> int:
    """A step from any integer, also one of NumPy; raises TypeError or ValueError for anything else."""
    if isinstance(step, bool) or not hasattr(step, "__index__"):
        raise TypeError(f"step: must be an integer, got {step!r:.40} ({type(step).__name__})")
    number = operator.index(step)
    if not 0 <= number < 10**18:
        raise ValueError(f"step: {number} is not from 0 to 10**18 - 1")
    return number


def checked_metric(metric: Any) -> float | None:
    """A finite metric from any number, also one of NumPy or torch, on any device; None for NaN and an infinity.

    Raises:
        TypeError: It is something else, such as a bool, a text or several numbers.
    """
    try:
        value = metric.item() if hasattr(metric, "item") else metric
        if not isinstance(value, bool | str | bytes):
            return number if math.isfinite(number := float(value)) else None
    except (ArithmeticError, RuntimeError, TypeError, ValueError):
        pass
    raise TypeError(f"metric: must be a number, got {metric!r:.40} ({type(metric).__name__})")


def step_name(step: int) -> str:
    """The name of a step's directory, without a revision."""
    return f"step-{step:08d}"


def mark_of(path: Location) -> Location:
    """What says that a deletion of a checkpoint, or of a folder of kept containers, has begun in a store of objects."""
    return path.with_name(path.name + ENDED)


def kept_folder(step: int, attempt: str) -> str:
    """The name of the folder of the kept containers that an attempt makes in a store of objects."""
    return f"kept-{step:08d}.{attempt}"


def with_attempt(name: str, attempt: str) -> str:
    """The name of a file with an attempt before its ending, as in a store of objects; without one, the name itself."""
    stem, dot, ending = name.rpartition(".")
    return f"{stem}.{attempt}{dot}{ending}" if attempt else name


def revisions(name: str) -> re.Pattern[str]:
    """Matches the name of a step's directory, and that of each revision: its number is the group."""
    return re.compile(re.escape(name) + r"(?:\.r([0-9]+))?\Z")


def hidden(target: Location) -> Location:
    """The path of ``target`` with a dot before its name. Frameworks do not list such names as checkpoints."""
    return target.with_name(f".{target.name}")


def partial(target: Location, attempt: str) -> Location:
    """The partial directory of an attempt to write ``target``."""
    return target.with_name(f"{stem_of_partial(target.name)}.partial-{attempt}")


def final_of(name: str) -> str:
    """The inverse of :func:`partial` for the name of a partial directory; empty for another name."""
    return match[1] if (match := PARTIAL.match(name)) else ""


def as_debris(path: Location) -> Location:
    """A new name beside ``path`` for a directory that is to be deleted: nobody takes it for a checkpoint."""
    return partial(path, secrets.token_hex(4))


def stem_of_partial(name: str) -> str:
    """The beginning of the name of a partial directory, given the final name.

    It is the final name itself; of a very long one, its beginning and a digest, so that the whole fits into a name.
    """
    encoded = os.fsencode(name)
    if len(encoded) + len(".partial-xxxxxxxx") + len(".replaced") <= _LONGEST:
        return name
    digest = hashlib.blake2b(encoded, digest_size=8).hexdigest()
    return f"{encoded[:_KEPT].decode(errors='ignore')}~{digest}"


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


Identity = tuple[int, str]
"""A checkpoint in whatever place: its step, and the name of the attempt that made it."""


def nowhere(path: Location) -> Identity | None:
    """The checkpoint that is listed under a path where nothing is, as only other hosts have it; None for others."""
    return (int(match[1]), match[3]) if (match := STEP.match(path.name)) and match[3] else None
