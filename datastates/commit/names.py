"""Names in a directory of checkpoints: of a step, and of the partial directory of a checkpoint, a folder or a file."""

from __future__ import annotations

import hashlib
import operator
import os
import re
import secrets
from typing import Any

from datastates.storage.location import Location

STEP = re.compile(r"step-([0-9]{8,18})(?:\.r([0-9]+))?\Z")
PARTIAL = re.compile(r"(.+)\.partial-[0-9a-f]{8}\Z", re.DOTALL)
LOCK = ".lock"
"""The file in a partial directory that its writers lock."""
HIDDEN = re.compile(r"\.")
"""The beginning of the names that :func:`hidden` gives."""
_LONGEST = 143
"""Most bytes of a file's name that every usual file system takes: eCryptfs takes the fewest."""
_KEPT = 100
"""Bytes of a too long name that are kept in the name of its partial directory."""


def checked_step(step: Any) -> int:
    """A step from any integer, also one of NumPy; raises TypeError or ValueError for anything else."""
    if isinstance(step, bool) or not hasattr(step, "__index__"):
        raise TypeError(f"step: must be an integer, got {step!r:.40} ({type(step).__name__})")
    number = operator.index(step)
    if not 0 <= number < 10**18:
        raise ValueError(f"step: {number} is not from 0 to 10**18 - 1")
    return number


def step_name(step: int) -> str:
    """The name of a step's directory, without a revision."""
    return f"step-{step:08d}"


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
