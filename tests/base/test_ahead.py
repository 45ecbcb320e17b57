"""Items are made while others are used, in their order, and no thread stays."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import SimpleQueue

import pytest

from datastates._base.ahead import ahead


@pytest.mark.parametrize("most", [1, 3, 100])
def test_the_items_come_in_order(most: int) -> None:
    assert list(ahead(range(50), most)) == list(range(50))
    assert list(ahead([], most)) == []


@pytest.mark.parametrize("most", [1, 3])
def test_so_many_are_made_while_one_is_used(most: int) -> None:
    made: SimpleQueue[int] = SimpleQueue()

    def items() -> Iterator[int]:
        for number in range(10):
            made.put(number)
            yield number

    used = ahead(items(), most)
    assert next(used) == 0
    assert [made.get(timeout=20) for _ in range(1 + most)] == list(range(1 + most))
    assert next(used) == 1
    assert made.get(timeout=20) == 1 + most
    assert list(used) == list(range(2, 10))


def test_a_failure_comes_after_the_items_before() -> None:
    def items() -> Iterator[int]:
        yield 1
        yield 2
        raise ValueError("three")

    used, seen = ahead(items(), 5), []
    with pytest.raises(ValueError, match="three"):
        seen.extend(iter(used.__next__, None))
    assert seen == [1, 2]


def test_the_thread_ends_where_the_items_are_not_wanted() -> None:
    made = iter(range(1000))
    used = ahead(made, 1)
    assert next(used) == 0
    (thread,) = [one for one in threading.enumerate() if one.name.startswith("datastates-ahead")]
    used.close()
    thread.join(20)
    assert not thread.is_alive()
    assert next(made) <= 3
