"""Fault points of the Python side: how they are armed."""

from __future__ import annotations

import errno

import pytest

from datastates._base import faults
from datastates._base.faults import Fault


def test_a_text_arms_points() -> None:
    assert faults.parse("store.rename=kill; write=fail:28@3;") == [
        Fault("store.rename", "kill"),
        Fault("write", "fail", 28, 3),
    ]


def test_what_does_not_parse_is_named() -> None:
    with pytest.raises(ValueError, match="'rename' is not point=action"):
        faults.parse("sync=kill;rename")


@pytest.mark.parametrize("fault", [Fault("store.rename", "delay", 5), Fault("store.rename", "fail")])
def test_what_a_point_cannot_do_is_refused(fault: Fault) -> None:
    with pytest.raises(ValueError, match=r"store\.rename can be armed with kill or fail:ERRNO, or with stop"):
        faults.arm(fault)


def test_hits_count_from_1() -> None:
    with pytest.raises(ValueError, match="count from 1"):
        faults.arm(Fault("store.rename", "kill", nth=0))


def test_a_point_fails_at_its_hit_only() -> None:
    faults.arm(Fault("store.rename", "fail", errno.EIO, nth=2))
    try:
        faults.hit("store.rename", "a")
        with pytest.raises(OSError, match="'b'") as raised:
            faults.hit("store.rename", "b")
        faults.hit("store.rename", "c")
    finally:
        faults.clear()
    assert raised.value.errno == errno.EIO
