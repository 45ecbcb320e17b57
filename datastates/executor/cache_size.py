"""How much host memory the default host cache may take."""

from __future__ import annotations

import os
from pathlib import Path

_SHARE = 4
_CGROUP = Path("/sys/fs/cgroup")


def automatic_cache() -> int:
    """The limit in bytes of a host cache with no size given: a quarter of the available memory, shared by local ranks.

    The number of local ranks is ``LOCAL_WORLD_SIZE``, or 1. Available memory is what can be allocated without swapping
    (``MemAvailable``), limited by what the process's control groups (version 2) leave.
    """
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return _available() // _SHARE // max(1, int(ranks) if ranks.isdecimal() else 1)


def _available() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    own = next((line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line[:3] == "0::"), "/")
    group = _CGROUP / own.lstrip("/")
    while group.is_relative_to(_CGROUP):
        limit, used = _number(group / "memory.max"), _number(group / "memory.current")
        if limit is not None and used is not None:
            available = min(available, max(0, limit - used))
        group = group.parent
    return available


def _number(file: Path) -> int | None:
    """The number in a control file; None if the file does not exist or says ``max``."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
