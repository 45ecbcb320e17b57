"""How much host memory the default host cache may take."""

from __future__ import annotations

import os
from pathlib import Path

_SHARE = 4
_CGROUP = Path("/sys/fs/cgroup")


def automatic_cache() -> int:
    """The limit in bytes of a host cache that was given no size: a quarter of what is available to each local rank.

    Only as much of it is used as the state needs. Available is what the kernel says could be allocated without
    swapping, and what the limits of the process's control groups (version 2) leave.
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
    """What a control file says; None where it is not there, or says ``max``."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
