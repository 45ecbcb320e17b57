"""The progress bar of commands that take long."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_bar(what: str, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on a terminal, if tqdm is installed (the ``cli`` extra).

    Yields:
        A function to call with a number of bytes that are done now, and the number of all bytes.
    """
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda nbytes, total: None
        return
    # None: no bar where standard error is no terminal
    with tqdm(total=0, unit="B", unit_scale=True, desc=what, disable=quiet or sys.stderr is None or None) as bar:

        def advance(nbytes: int, total: int) -> None:
            bar.total = total
            bar.update(nbytes)

        yield advance
