"""Raises an exception within a call, at a place that is counted, as a signal handler may raise one."""

from __future__ import annotations

import collections
import contextlib
import dis
import sys
from collections.abc import Collection, Iterator
from types import CodeType, FrameType
from typing import Any


class Interrupt(BaseException):
    """What a signal handler may raise."""


def exits(code: CodeType) -> set[int]:
    """Offsets in a function where a ``with`` block or a handler is about to be left. Python handles no signals there.

    An exception that a tracer raises where a handler is left would keep the handled one alive for ever, and its frames.
    """
    found, before = set(), collections.deque[dis.Instruction](maxlen=4)
    for one in dis.get_instructions(code):
        named = [(each.opname, each.argval) for each in before]
        if one.opname in ("PRECALL", "CALL", "CALL_FUNCTION") and named[-3:] == [("LOAD_CONST", None)] * 3:
            # a result is put aside before
            found |= {each.offset for each in before if each is before[-3] or each.opname in ("SWAP", "ROT_TWO")}
        if one.opname == "POP_EXCEPT":
            found.add(one.offset)
        before.append(one)
    return found


class Tracer:
    """Raises :class:`Interrupt` at the n-th line that is reached, of all files or of some."""

    def __init__(self, number: int, files: Collection[str] | None = None) -> None:
        self.left = number
        self.place = ""
        self._files = files

    def trace(self, frame: FrameType, event: str, arg: object) -> Any:
        name = frame.f_code.co_filename
        if self.place or name.startswith("<frozen importlib"):
            return None
        if event == "line" and (self._files is None or name in self._files) and frame.f_lasti not in _exits(frame):
            if not self.left:
                self.place = f"{name}:{frame.f_lineno} {frame.f_code.co_name}"
                raise Interrupt
            self.left -= 1
        return self.trace

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        sys.settrace(self.trace)
        try:
            yield
        finally:
            sys.settrace(None)


def _exits(frame: FrameType) -> set[int]:
    if frame.f_code not in _known:
        _known[frame.f_code] = exits(frame.f_code)
    return _known[frame.f_code]


_known: dict[CodeType, set[int]] = {}
