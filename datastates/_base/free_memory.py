"""How much host memory this process can still allocate."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class _Files(NamedTuple):
    """The files of a version of control groups, from the directory where the kernel shows the groups."""

    directory: str
    limit: str
    used: str
    cached: tuple[str, ...]
    """Fields of ``memory.stat``: bytes of the page cache, which the kernel gives up before it refuses memory."""


_VERSION_1 = _Files(
    "sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
_VERSION_2 = _Files("sys/fs/cgroup", "memory.max", "memory.current", ("inactive_file", "active_file"))


def local_ranks() -> int:
    """The number of ranks on this host: ``LOCAL_WORLD_SIZE``, or 1."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(ranks) if ranks.isdecimal() else 1)


def host_memory(root: Path = Path("/"), *, swap: bool = False) -> int:
    """Bytes of host memory that can be allocated.

    It is ``MemAvailable``, or what the limits of the process's control groups (versions 1 and 2) leave, if that is
    less. The groups around a group count, too. Other processes may take the same memory meanwhile.

    Args:
        root: The folder that has ``proc`` and ``sys``.
        swap: Add free swap space, except for a group of version 1.
    """
    fields = _fields(root / "proc/meminfo")
    swappable = fields.get("SwapFree:", 0) * 1024 if swap else 0
    available = fields["MemAvailable:"] * 1024 + swappable
    for group, files in _groups(root):
        limit, used = _number(group / files.limit), _number(group / files.used)
        if limit is not None and used is not None:
            stat = _fields(group / "memory.stat")
            cached = sum(stat.get(field, 0) for field in files.cached)
            available = min(available, max(0, limit - max(0, used - cached)) + _swap_left(group, swappable))
    return available


def _swap_left(group: Path, swappable: int) -> int:
    """The bytes of ``swappable`` swap space that a group may use; 0 for a group of version 1."""
    used = _number(group / "memory.swap.current")
    if used is None:
        return 0
    limit = _number(group / "memory.swap.max")
    return swappable if limit is None else min(swappable, max(0, limit - used))


def _groups(root: Path) -> Iterator[tuple[Path, _Files]]:
    """The control groups of this process that may limit its memory, each with the files of its version."""
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, own = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        files = _VERSION_1 if controllers else _VERSION_2
        top = root / files.directory
        group = top / own.lstrip("/")
        while group.is_relative_to(top):
            yield group, files
            group = group.parent


def _number(file: Path) -> int | None:
    """The number in a control file; None if the file does not exist or says ``max``."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _fields(file: Path) -> dict[str, int]:
    """The numbers of a file with a name and a number in each line; empty if the file does not exist."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return {}
    return {name: int(number) for name, number, *_ in map(str.split, lines)}
