"""Checkpoints under way end in their order, each failure is told once, and nobody waits in vain."""

from __future__ import annotations

import threading

import pytest

from datastates.files.in_flight import InFlight
from datastates.files.settings import FileSettings
from datastates.files.transaction import Transaction


def _held(files: InFlight, go: threading.Event) -> Transaction:
    """A checkpoint under way, which ends when ``go`` is set."""

    def publish(failure: BaseException | None) -> None:
        go.wait()
        if failure is not None:
            raise failure

    save = files.transaction("a", publish)
    files.put(save)
    return save


def test_a_withdrawn_checkpoint_ends_in_its_turn() -> None:
    files, go = InFlight(FileSettings()), threading.Event()
    first = _held(files, go)
    second = files.transaction("b", lambda failure: None)
    files.put(second)
    assert second.withdraw()
    assert not second.ended
    threading.Timer(0.05, go.set).start()
    files.wait()
    assert first.ended
    assert second.exception is None


def test_an_interrupted_wait_for_room_leaves_the_checkpoint_to_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    files, go = InFlight(FileSettings(max_in_flight=1)), threading.Event()
    save = _held(files, go)

    def interrupted(self: Transaction, timeout: float | None = None) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Transaction, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            files.begin()
    assert files.saves == [save]
    go.set()
    files.begin()
    assert files.saves == []
