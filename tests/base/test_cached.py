"""Attributes that are computed once, and by no thread for another one."""

from __future__ import annotations

import threading

from datastates._base.cached import cached_property


class Slow:
    def __init__(self, other: threading.Event | None) -> None:
        self.other, self.count = other, 0

    @cached_property
    def value(self) -> int:
        """A number."""
        self.count += 1
        if self.other is not None:
            assert self.other.wait(30), "another object's attribute waited for this one's"
        return 7


def test_it_is_computed_once() -> None:
    one = Slow(None)
    assert (one.value, one.value, one.count) == (7, 7, 1)
    assert Slow.value.__doc__ == "A number."


def test_one_object_does_not_hold_up_another() -> None:
    done = threading.Event()
    thread = threading.Thread(target=lambda: Slow(done).value)
    thread.start()
    try:
        other = threading.Thread(target=lambda: (Slow(None).value, done.set()), daemon=True)
        other.start()
        assert done.wait(20)
    finally:
        done.set()
        thread.join()
