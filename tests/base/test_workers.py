"""Workers: every work is done once, in order, and the threads end."""

from __future__ import annotations

import gc
import os
import signal
import threading

import pytest

from datastates._base.tasks import Task, each
from datastates._base.waiting import Bell, Flag
from datastates._base.workers import Work, Workers, finish
from datastates.errors import ClosedError


def test_work_is_done_in_order_on_no_more_threads_than_allowed() -> None:
    done: list[int] = []
    workers = Workers("test", 1)
    for number in range(100):
        workers.do(lambda number=number: done.append(number))
    workers.wait_done()
    assert done == list(range(100))
    workers.stop()
    workers.join()


def test_each_work_that_waits_gets_a_thread_of_its_own() -> None:
    workers, meeting = Workers("test", 8), threading.Barrier(8)
    for _ in range(3):
        tasks = [Task(meeting.wait) for _ in range(8)]
        for task in tasks:
            workers.put(task)
        assert sorted(task.result(30) for task in tasks) == list(range(8))
    workers.stop()
    workers.join()


def test_stopped_workers_do_what_was_put_before_and_refuse_more() -> None:
    workers, begin, done = Workers("test", 2), Flag(), list[int]()
    workers.do(begin.wait)
    for number in range(10):
        workers.do(lambda number=number: done.append(number))
    workers.stop()
    with pytest.raises(ClosedError):
        workers.do(lambda: done.append(99))
    begin.set()
    workers.join()
    assert sorted(done) == list(range(10))


def test_work_that_was_taken_back_is_not_done() -> None:
    workers, begin, done = Workers("test", 1), Flag(), list[int]()
    work = Work(lambda: done.append(1))
    workers.do(begin.wait)
    workers.put(work)
    assert work.take() is not None
    assert work.take() is None
    begin.set()
    workers.wait_done()
    assert done == []


def test_threads_of_dropped_workers_end() -> None:
    workers = Workers("dropped", 3)
    workers.do(lambda: None)
    (thread,) = [t for t in threading.enumerate() if t.name.startswith("dropped")]
    del workers
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()


def test_each_gives_results_in_order_and_the_first_error() -> None:
    assert each(lambda number: number * 2, range(50), 4) == [number * 2 for number in range(50)]
    assert each(str, [], 4) == []
    with pytest.raises(ZeroDivisionError):
        each(lambda number: 1 // number, [2, 1, 0, 5], 2)


def test_a_bell_wakes_all_that_wait_and_a_wait_ends_in_time() -> None:
    bell, values = Bell(), list[int]()
    assert bell.wait_for(lambda: values, timeout=0.01) == []
    tasks = [Task(lambda: bell.wait_for(lambda: len(values) > 1)) for _ in range(4)]
    workers = Workers("test", 4)
    for task in tasks:
        workers.put(task)
    for value in range(2):
        values.append(value)
        bell.ring()
    assert [task.result(30) for task in tasks] == [True] * 4


def test_a_forked_child_starts_threads_of_its_own_and_ends() -> None:
    held, done = Flag(), list[int]()
    workers = Workers("test", 1)
    workers.do(held.wait)  # the child has neither the thread nor its work
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # ends a child that hangs
        finish()
        workers.do(lambda: done.append(1))
        finish()
        os._exit(0 if done == [1] else 3)
    status = os.waitpid(child, 0)[1]
    held.set()
    workers.wait_done()
    assert status == 0
