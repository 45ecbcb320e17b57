"""Writes the package's lines to the logger ``datastates``. A handler or filter that raises harms nothing.

Handlers and filters are the program's. What they raise would come out of a line in the middle of a save: it would end a
thread that others wait for. It goes to standard error instead, with the line, as :mod:`logging` tells of a handler that
fails in its own care. An interrupt is raised on the program's threads.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback

_logger = logging.getLogger("datastates")


def is_own_thread() -> bool:
    """Whether the calling thread is one of this package's: their names begin with ``datastates``."""
    return threading.current_thread().name.startswith("datastates")


def debug(text: str, *values: object) -> None:
    """Write a line of the level DEBUG: ``text % values``."""
    _write(logging.DEBUG, text, values)


def info(text: str, *values: object) -> None:
    """Write a line of the level INFO."""
    _write(logging.INFO, text, values)


def shows_info() -> bool:
    """Whether a line of the level INFO would be written: if not, nobody need compose one."""
    return _logger.isEnabledFor(logging.INFO)


def warning(text: str, *values: object) -> None:
    """Write a line of the level WARNING."""
    _write(logging.WARNING, text, values)


def error(text: str, *values: object, of: BaseException | None = None) -> None:
    """Write a line of the level ERROR, with the traceback of an error if one is given."""
    _write(logging.ERROR, text, values, of)


def _write(level: int, text: str, values: tuple[object, ...], of: BaseException | None = None) -> None:
    try:
        # a handler may keep what it is given, and an error keeps all that its traceback refers to
        values = tuple(str(value) if isinstance(value, BaseException) else value for value in values)
        _logger.log(level, text, *values, exc_info=of, stacklevel=3)  # the line is the caller's of warning() and so on
    except BaseException as raised:
        _raise_interrupt(raised)
        if logging.raiseExceptions:  # else the program wants to hear of no failing handler
            _tell(raised, f"{logging.getLevelName(level)}: {text}", values)


def _tell(raised: BaseException, text: str, values: tuple[object, ...]) -> None:
    try:
        traceback.print_exception(raised)
        print("A handler or filter of logging has raised this at the line", text % values, file=sys.stderr)
    except BaseException as again:  # standard error may be the program's, too
        _raise_interrupt(again)


def _raise_interrupt(raised: BaseException) -> None:
    if not isinstance(raised, Exception) and not is_own_thread():
        raise raised
