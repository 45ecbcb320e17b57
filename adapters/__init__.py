"""Integrations with training frameworks and libraries of metrics: the only package that imports them."""

from __future__ import annotations

from datastates.saving import gate as of_snapshots

__all__ = ["gate"]


def gate() -> None:
    """Wait until what frameworks have begun to save in this process may change. Thread-safe.

    Call it before an update that is not an optimizer's step, such as a swap of the weights with their average. It waits
    for the capture only, as :meth:`Checkpointer.gate() <datastates.Checkpointer.gate>` does for one checkpointer.
    """
    of_snapshots.pass_all()
