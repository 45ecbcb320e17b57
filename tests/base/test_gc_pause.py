"""The garbage collector is paused by the main thread alone, and left as it was."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest

from datastates._base.gc_pause import paused


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def is_enabled_inside() -> bool:
    with paused():
        return gc.isenabled()


def test_the_main_thread_pauses_it() -> None:
    assert not is_enabled_inside()
    assert gc.isenabled()


def test_it_stays_off_where_it_was_off() -> None:
    gc.disable()
    assert not is_enabled_inside()
    assert not gc.isenabled()


def test_a_background_thread_leaves_it_alone() -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(is_enabled_inside).result()

        def switch_off_meanwhile() -> None:
            with paused():
                gc.disable()

        pool.submit(switch_off_meanwhile).result()
    assert not gc.isenabled()


@pytest.mark.parametrize("line", range(7))
def test_an_interrupt_at_any_line_leaves_it_enabled(line: int) -> None:
    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal line
        if frame.f_code is not paused.__wrapped__.__code__:  # type: ignore[attr-defined]  # of contextlib
            return trace
        if event == "line":
            line -= 1
            if line < 0:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        is_enabled_inside()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    assert gc.isenabled()
