"""Lets code that looks at a checkpoint under way wait until it has ended, as if it had been saved without delay.

While a checkpoint is under way, calls that would show it wait for its end, on any thread of the process: calls that
open, list or stat its paths (``open``, ``os.listdir``, ``os.scandir``, ``os.stat``, and functions built on them, such
as ``glob``, ``shutil`` and ``torch.load``), calls that move it, or delete it or an older one beside it, and calls that
start a program. No other path is concerned.

Python tells of these calls by audit events. Functions stand in for calls that raise none: ``os.stat`` and its like,
``torch.save``, and functions of safetensors. Nobody hears of other libraries that open files by themselves, of forked
processes, or of processes that run already.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from datastates._base import log
from datastates.errors import CommitError

_LISTS = frozenset({"os.listdir", "os.scandir"})
_MOVES = frozenset({"os.rename", "os.link"})
_MAKES = frozenset({"os.mkdir", "os.symlink"})
_DELETES = frozenset({"os.remove", "os.rmdir", "shutil.rmtree"})
_CHANGES = frozenset({"os.chdir", "os.chmod", "os.chown", "os.truncate", "os.utime"})
_STARTS = frozenset({"subprocess.Popen", "os.system", "os.posix_spawn", "os.exec", "pty.spawn"})
_STATS = ("stat", "lstat", "access")
_ANEW = os.O_CREAT | os.O_TRUNC
_LOCKED = frozenset({"importlib._bootstrap_external", "logging", "logging.handlers"})
"""Modules that look while they hold a lock, which the end of a checkpoint may need. None of them looks for checkpoints.
"""

_STARTERS = ("deepspeed.", "torch._inductor.", "torch.cuda.", "torch.utils.", "triton.")
"""Modules that start programs for a training step, such as numactl or a compiler. None of these looks for checkpoints.
"""


@dataclass(frozen=True, slots=True, eq=False)
class UnderWay:
    """A checkpoint that is being written. All paths are real paths, without links."""

    name: str
    """The checkpoint's name in the log."""
    root: str
    """The folder that the framework was told to save in. Older checkpoints may lie in it or beside it."""
    folder: str
    """The folder in which everything is this checkpoint's, but for hidden files."""
    files: frozenset[str]
    """Paths that appear at the end: files in ``folder`` or elsewhere, or ``folder`` itself."""
    end: Callable[[], BaseException | None]
    """Waits until the checkpoint has ended; returns why nothing may be deleted now, or None."""
    older: re.Pattern[str] | None = None
    """Matches names beside ``root`` that may be deleted when the checkpoint is complete."""
    room: str | None = None
    """The folder in which the checkpoint is hidden until it gets its name, if not the folder of its final path."""


def whole(
    final: os.PathLike[str],
    end: Callable[[], BaseException | None],
    older: re.Pattern[str] | None = None,
    room: os.PathLike[str] | None = None,
) -> UnderWay:
    """Describe a checkpoint that is a file, or a folder that is absent until complete. See :class:`UnderWay`."""
    real = _real(final)
    hidden_in = None if room is None else os.path.realpath(room)
    return UnderWay(os.path.basename(real), real, real, frozenset({real}), end, older, hidden_in)


def _real(path: os.PathLike[str]) -> str:
    """A path whose folder is without links."""
    folder, name = os.path.split(path)
    return os.path.join(os.path.realpath(folder), name)


_Concerns = Callable[[UnderWay, str], bool]
_under_way: tuple[UnderWay, ...] = ()
_lock = threading.Lock()
_here = threading.local()
_installed = False
_told = False


def begin(checkpoint: UnderWay) -> None:
    """From now on, let code that looks at the checkpoint wait for its end. Thread-safe."""
    global _installed, _under_way
    with _lock:
        if not _installed:
            _install()
            _installed = True
        _under_way = (*_under_way, checkpoint)


def end(checkpoint: UnderWay) -> None:
    """Note that the checkpoint has ended, and let waiting code go on. Thread-safe, idempotent."""
    global _under_way
    with _lock:
        _under_way = tuple(other for other in _under_way if other is not checkpoint)


def finish(final: os.PathLike[str]) -> None:
    """Wait for the end of every checkpoint whose final path this is."""
    real = _real(final)
    for checkpoint in _under_way:
        if real in checkpoint.files:
            checkpoint.end()


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """A context in which this thread does not wait, as within a framework's own save."""
    before = getattr(_here, "unwatched", False)
    _here.unwatched = True
    try:
        yield
    finally:
        _here.unwatched = before


def _install() -> None:
    import torch

    os.register_at_fork(after_in_child=_forget)
    for name in _STATS:
        stock = getattr(os, name)
        call = _standing_in(stock, "path", 0, _shows)
        for able in (os.supports_dir_fd, os.supports_effective_ids, os.supports_fd, os.supports_follow_symlinks):
            if stock in able:
                able.add(call)
        setattr(os, name, call)
    _replace(torch.save, "f", 1, _is_written)
    with contextlib.suppress(ImportError):
        import safetensors

        _replace(safetensors.safe_open, "filename", 0, _shows)
        _replace(safetensors.serialize_file, "filename", 1, _is_written)
    sys.addaudithook(_heard)


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", function))  # a program may have put an object without a name in its place


def _forget() -> None:
    global _lock, _under_way
    _lock, _under_way = threading.Lock(), ()


def _standing_in(stock: Callable[..., Any], keyword: str, index: int, concerns: _Concerns) -> Callable[..., Any]:
    """Wrap a function: it first waits for checkpoints that concern its path, argument ``keyword`` or ``index``."""

    @functools.wraps(stock, updated=())
    def call(*words: Any, **options: Any) -> Any:
        if _under_way:
            path = words[index] if len(words) > index else options.get(keyword)
            _wait(_name(stock), path, concerns)
        return stock(*words, **options)

    if stock.__module__ == "posix":
        call.__module__ = "os"  # where pickle finds it
    return call


def _replace(stock: Callable[..., Any], keyword: str, index: int, concerns: _Concerns) -> None:
    """Replace a function by one that waits, in all modules that have it under its own name."""
    name, call = _name(stock), _standing_in(stock, keyword, index, concerns)
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is stock:
            setattr(module, name, call)


def _heard(event: str, words: tuple[Any, ...]) -> None:
    if not _under_way:
        return
    if event == "open":
        _wait(event, words[0], _is_written if words[2] & _ANEW else _shows)
    elif event in _MAKES:
        if event == "os.symlink":
            _wait(event, os.path.join(os.path.dirname(os.fsdecode(words[1])), os.fsdecode(words[0])), _shows)
        _wait(event, words[event == "os.symlink"], _is_written)
    elif event in _CHANGES:
        _wait(event, words[0], _shows)
    elif event in _LISTS:
        _wait(event, os.curdir if words[0] is None else words[0], _lists)
    elif event in _MOVES:
        for path in words[:2]:
            _wait(event, path, _moves)
    elif event in _DELETES:
        _wait(event, words[0], _deletes, deletes=True)
    elif event in _STARTS and not _starter().startswith(_STARTERS):
        _wait(event, os.sep, lambda checkpoint, path: True)


def _starter() -> str:
    """The module that starts a program, through the standard library or not."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (name := str(frame.f_globals.get("__name__"))) in ("subprocess", "os", "pty"):
        frame = frame.f_back
    return "" if frame is None else name


def _shows(checkpoint: UnderWay, path: str) -> bool:
    hidden = os.path.basename(path).startswith(".")
    return _is_written(checkpoint, path) or (_is_in(path, checkpoint.folder) and not hidden)


def _is_written(checkpoint: UnderWay, path: str) -> bool:
    if any(path == file or _is_in(path, file) for file in checkpoint.files):
        return True
    home = os.path.dirname(checkpoint.root)
    if checkpoint.older is None or not _is_in(path, home):
        return False
    return checkpoint.older.fullmatch(os.path.relpath(path, home).partition(os.sep)[0]) is not None


def _lists(checkpoint: UnderWay, path: str) -> bool:
    path = os.path.realpath(path)
    parents = map(os.path.dirname, checkpoint.files)
    return path in (*parents, checkpoint.folder, checkpoint.room) or _shows(checkpoint, path)


def _moves(checkpoint: UnderWay, path: str) -> bool:
    return path == checkpoint.folder or _is_in(checkpoint.folder, path) or _shows(checkpoint, path)


def _deletes(checkpoint: UnderWay, path: str) -> bool:
    # of files beside it, only those that are named like a checkpoint's: another may be a log, which a handler of
    # logging renews while a thread that writes the checkpoint waits to log
    if _moves(checkpoint, path):
        return True
    ending = os.path.splitext(path)[1]
    alike = not ending or os.path.isdir(path) or any(file.endswith(ending) for file in checkpoint.files)
    return alike and _is_in(path, os.path.dirname(checkpoint.root))


def _is_in(path: str, folder: str) -> bool:
    return path.startswith(folder.rstrip(os.sep) + os.sep)


def _wait(call: str, path: Any, concerns: _Concerns, *, deletes: bool = False) -> None:
    global _told
    # a garbage collection may make a thread of this package look at anything, and it must not wait for itself
    if getattr(_here, "unwatched", False) or log.is_own_thread():
        return
    if not isinstance(path, (str, bytes, os.PathLike)):
        return  # a descriptor or a buffer
    caller = sys._getframe(1).f_back
    if caller is not None and caller.f_globals.get("__name__") in _LOCKED:
        return
    with unwatched():
        folder, name = os.path.split(os.path.abspath(os.fsdecode(path)))
        paths = [real := os.path.join(os.path.realpath(folder), name)]
        if concerns not in (_moves, _deletes) and os.path.islink(real):
            paths.append(os.path.realpath(real))
        for checkpoint in _under_way:
            if any(concerns(checkpoint, each) for each in paths):
                if not _told:
                    _told = True
                    text = "%s(%s) waits until the checkpoint %s is complete, as others that look at it will"
                    log.warning(text, call, path, checkpoint.name)
                failure = checkpoint.end()
                if deletes and failure is not None:
                    raise CommitError(f"{real} is not deleted: the checkpoint {checkpoint.name} has failed: {failure}")
