"""Kills and failures while a checkpoint links what has not changed: what was committed stays whole, and alone."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from short import first
from test_sharing import LOOP, audited, killed_and_resumed, shared_by

from datastates.commit.tiers import tier_of

LINKING = LOOP.replace(
    "reflinks.emulate()", "from datastates.commit import trial\ntrial.shares_ranges = lambda folder: False"
)
"""The loop of the other test, where files share no ranges: each step but the first two links."""

KILLS = [
    *(f"store.link=kill@{nth}" for nth in (2, 1)),
    *(f"write=kill@{nth}" for nth in (5, 9, 12, 14)),
    *(f"{point}=kill@{nth}" for point in ("open", "allocate", "sync", "close") for nth in (3, 5)),
    *(f"store.{point}=kill@{nth}" for point in ("open", "rename", "sync_directory") for nth in (3, 4)),
]


@pytest.mark.parametrize("fault", first(KILLS, rest=pytest.mark.by_hand))
def test_killed_while_it_links(fault: str, tmp_path: Path, run: Callable[..., Any]) -> None:
    committed, links = killed_and_resumed(LINKING, fault, tmp_path, run)
    assert links[-3:] == [bool(committed), True, True], "what was restored is a base"


REFUSALS = ["EMLINK", "EXDEV", "EPERM", "EOPNOTSUPP", "ENOSPC", "EDQUOT", "EIO"]


@pytest.mark.parametrize("name", first(REFUSALS, rest=pytest.mark.by_hand))
def test_what_storage_refuses_to_link_is_written(name: str, tmp_path: Path, run: Callable[..., Any]) -> None:
    ended = run("-c", LINKING, tmp_path, DATASTATES_FAULTS=f"store.link=fail:{getattr(errno, name)}@1")
    assert ended.returncode == 0, ended.stderr
    assert [shared > 0 for shared in shared_by(ended.stdout)] == [False, False, False, True]
    assert audited(tmp_path) == [2, 3]
    assert tier_of(tmp_path).debris() == []
