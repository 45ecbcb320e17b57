"""Lets the processes of one run find each other in a shared directory, whatever killed runs have left there.

All files are below ``.ranks``. The steps:

1. Every process leaves a file ``hello-RANK-SIZE-NONCE``. Rank 0 makes a folder with a random name for the run.
2. Once every rank has said hello, rank 0 writes into ``session-RUN`` which processes it has seen. Some may be dead:
   their files look like a living process's.
3. A process that finds its own nonce there answers with a file in the run's folder. When more processes come, rank 0
   writes the session again.
4. Once a process of each rank has answered, rank 0 writes who the members are. Only then do they form a run. If the
   time is up before that, it writes which ranks are missing.

Only its own rank 0 writes or deletes the session of a living run. So one run may end while the next one begins.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from datastates._base.process import is_gone, own_name
from datastates.errors import RanksMissingError, SettingsError, StorageError, UnreachableError, rank_names
from datastates.ranks.polling import slowest, until
from datastates.storage import Folders, Lock, folders_of
from datastates.storage.location import Location
from datastates.storage.objects import ABSENT


def store(path: Location) -> Folders:
    """The :class:`Folders` of the shared directory where ranks meet."""
    return folders_of(path, "ranks")


def names(folder: Location) -> list[str]:
    """The names in a folder; none if the folder is absent. Skips dot files: they are still being written."""
    return [name for name in store(folder).names(folder, stale_ok=True) if not name.startswith(".")]


def read(path: Location) -> bytes | None:
    """The contents of a file; None if it is absent."""
    try:
        return store(path).read_all(path)
    except StorageError as error:
        if error.errno in ABSENT:
            return None
        raise


def remove(path: Location) -> None:
    """Delete a file or a folder. Other processes may delete or add entries meanwhile: that is no error."""
    if store(path).is_folder(path):
        store(path).remove_tree(path)
    else:
        store(path).remove(path, missing_ok=True)


class FileBoard:
    """A :class:`~datastates.ranks.board_world.Board` below the folder of a run. A box is a folder.

    A message is a file in it, named after the rank. The file is the rank's mark, too. The board relies only on
    guarantees of NFS: a rename is atomic, and a listing of a directory shows every entry that was renamed into it
    before. It lists the directory, and never opens a path on the chance that it exists: a client may remember that a
    name was absent.
    """

    def __init__(self, folder: Location, rank: int, leave: Callable[[], None]) -> None:
        """Use ``folder``, which rank 0 has made and named after the run. Rank 0 calls ``leave`` to delete it."""
        self._folder = folder
        self._rank = rank
        self._leave = leave

    @property
    def run(self) -> str:
        """The random name that rank 0 gave the run."""
        return self._folder.name

    def _box(self, box: str) -> Location:
        # readable; the hash keeps names of different boxes apart
        readable = re.sub("[^A-Za-z0-9_.-]", "_", box)[-100:].lstrip(".")
        return self._folder / f"{readable}-{hashlib.blake2b(box.encode(), digest_size=8).hexdigest()}"

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except StorageError as error:
            if error.errno not in ABSENT:
                raise
            raise self._gone() from error

    def _gone(self) -> UnreachableError:
        return UnreachableError(f"{self._folder} is gone: rank 0 has closed this run, or has begun another one there")

    def put(self, box: str, data: bytes) -> None:
        """Leave this rank's message and its mark."""
        folder = self._box(box)
        with self._writing():
            store(folder).add_folder(folder, exist_ok=True)
            store(folder).replace(folder / str(self._rank), data)

    def mark(self, box: str) -> None:
        """Leave this rank's mark: an empty message."""
        self.put(box, b"")

    def _marked(self, box: str) -> list[int]:
        folder = self._box(box)
        return [int(name) for name in names(folder)] if folder.name in names(self._folder) else []

    def marks(self, box: str) -> int:
        """The number of ranks that have left a mark."""
        return len(self._marked(box))

    def read(self, box: str, ranks: Iterable[int]) -> dict[int, bytes]:
        """The messages that any of these ``ranks`` left, by rank."""
        there = set(self._marked(box))
        found = {rank: read(self._box(box) / str(rank)) for rank in ranks if rank in there}
        return {rank: data for rank, data in found.items() if data is not None}

    def claim(self, box: str) -> int:
        """Claim a box; returns the rank that claimed it first."""
        folder = self._box(box)
        mine = self._folder / f".claim-{secrets.token_hex(4)}"
        with self._writing():
            store(mine).add_folder(mine)
            # not a file: by the rename, rclone loses an empty one that it is still to upload
            store(mine).add_folder(mine / str(self._rank))
            try:
                store(mine).rename(mine, folder)  # fails if another rank's claim is there: it is not empty
            except StorageError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                remove(mine)
        if not (claims := self._marked(box)):
            raise self._gone()
        return claims[0]

    def take_back(self, box: str) -> None:
        """Delete this rank's message."""
        remove(self._box(box) / str(self._rank))

    def drop(self, box: str, ranks: Iterable[int]) -> None:
        """Delete the box with everything in it."""
        remove(self._box(box))

    def close(self, *, given_up: bool) -> None:
        """On rank 0, delete what the run left in the directory."""
        del given_up
        if self._rank == 0:
            self._leave()


FOLDER = ".ranks"
_ANSWERS = "joined"
_ALIVE = ".alive"  # rank 0 keeps it locked while the run lasts
_HELLO = re.compile(r"hello-([0-9]+)-([0-9]+)-([0-9a-f]{16})\Z")
_RUN = "[0-9a-f]{16}"
_SESSION = re.compile(rf"\.?session-({_RUN})(\.[0-9a-f]+)?\Z")  # with a leading dot: still being written


class _Session(BaseModel):
    """The contents of a session file, which rank 0 writes. A process is written as ``RANK-NONCE``."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    run: Annotated[str, Field(pattern=f"^{_RUN}$")]
    seen: list[str]
    members: list[str] | None = None
    """The processes of the run, once one of each rank has answered."""
    missing: list[int] | None = None
    """The ranks that had not answered when the time was up."""
    failure: str = ""


def _rank_of(process: str) -> int:
    return int(process.partition("-")[0])


def join(directory: Location, rank: int, size: int, timeout: float) -> FileBoard:
    """Meet the other processes of this run below a directory, which is created if needed.

    Raises:
        RanksMissingError: Some ranks did not come within ``timeout`` seconds.
        SettingsError: Another process has the same rank.
        StorageError: The directory cannot be written.
    """
    root = directory / FOLDER
    store(directory).make_folder(directory)
    process = f"{rank}-{secrets.token_hex(8)}"
    hello = root / f"hello-{rank}-{size}-{process.partition('-')[2]}"
    _say_hello(hello, timeout)
    try:
        run, lock = _gather(root, size, timeout) if rank == 0 else (_follow(root, process, size, timeout), None)
    finally:
        remove(hello)
    return FileBoard(root / run, rank, partial(_leave, root, run, lock))


def _say_hello(hello: Location, timeout: float) -> None:
    end, root, there = time.monotonic() + timeout, hello.parent, store(hello)
    while True:
        try:
            there.add_folder(root, exist_ok=True)
            there.touch(hello)
            return
        except StorageError as error:
            # a run that has just ended deleted the folder, before or after it was found to exist: try again
            gone = error.errno == errno.EEXIST or (error.errno == errno.ENOENT and there.is_folder(root.parent))
            if not gone or time.monotonic() > end:
                raise


def _leave(root: Location, run: str, lock: Lock | None) -> None:
    remove(_session(root, run))
    if lock is not None:
        lock.close()  # first: FUSE keeps a file that is open under a hidden name, and so the directory
    remove(root / run)
    with contextlib.suppress(OSError):  # not empty: the next run is about to begin there
        store(root).remove_empty(root)


def _session(root: Location, run: str) -> Location:
    return root / f"session-{run}"


def _told(root: Location, process: str) -> Iterator[_Session]:
    """Yield every session that names a process, from any rank 0."""
    for name in filter(_SESSION.match, names(root)):
        try:
            session = _Session.model_validate_json(read(root / name) or b"")
        except ValidationError:  # cut short when its machine went down
            continue
        if process in session.seen:
            yield session


def _tell(root: Location, session: _Session) -> None:
    store(root).replace(_session(root, session.run), session.model_dump_json().encode())


def _gather(root: Location, size: int, timeout: float) -> tuple[str, Lock]:
    """As rank 0, begin a run and meet the other ranks; returns the run's name and its held lock."""
    run = secrets.token_hex(8)
    answers = root / run / _ANSWERS
    for folder in (root, root / run, answers):  # a run that has just ended may have deleted the first one
        store(root).add_folder(folder, exist_ok=True)
    lock = store(root).open_lock(root / run / _ALIVE, create=own_name().encode())
    try:
        lock.hold()
        _meet(root, run, size, timeout)
    except BaseException:
        lock.close()
        remove(root / run)
        raise
    return run, lock


def _meet(root: Location, run: str, size: int, timeout: float) -> None:
    """As rank 0, write the session until a process of each rank has answered, then name the members."""
    answers = root / run / _ANSWERS
    others = set(range(1, size))
    told = _Session(run=run, seen=[])

    def members() -> list[str] | None:
        nonlocal told
        seen = _seen(root, size)
        newest = {_rank_of(process): process for process in seen}
        if set(newest) != others:
            return None
        if seen != told.seen:
            told = _Session(run=run, seen=seen)
            _tell(root, told)
        # of two processes with one rank, the older one counts as dead, even if it has answered
        return list(newest.values()) if set(newest.values()) <= set(names(answers)) else None

    # rank 0 stops waiting early, so that the others still hear in time which ranks are missing
    patience = timeout - min(timeout / 5, 30.0)
    found = until(members, time.monotonic() + patience, slowest(size))
    if found is None:
        seen = _seen(root, size)
        newest = {_rank_of(process): process for process in seen}
        came = set(names(answers))
        missing = sorted(rank for rank in others if newest.get(rank) not in came)
        text = f"{root}: {rank_names(missing)} of {size} did not come within {patience:.3g} s"
        _tell(root, _Session(run=run, seen=seen, missing=missing, failure=text))
        raise RanksMissingError(text, ranks=missing)
    _tell(root, _Session(run=run, seen=told.seen, members=found))
    _clear(root, run)


def _seen(root: Location, size: int) -> list[str]:
    """The other processes that have said hello, oldest first."""
    ages = {}
    for hello in filter(None, map(_HELLO.match, names(root))):
        is_other = int(hello[2]) == size and 0 < int(hello[1]) < size
        # None: the process has just given up, and has removed its file
        if is_other and (found := store(root).look(root / hello[0])) is not None:
            ages[f"{hello[1]}-{hello[3]}"] = found.changed
    return sorted(ages, key=lambda process: (ages[process], process))


def _clear(root: Location, run: str) -> None:
    """Delete the files of killed runs. Spares other living runs in the directory; this process may be part of them."""
    for name in store(root).names(root):
        session = _SESSION.match(name)
        other = session[1] if session else name
        is_dead = other != run and re.fullmatch(_RUN, other) and not _is_alive(root / other)
        if is_dead or _HELLO.match(name):
            remove(root / name)


def _is_alive(folder: Location) -> bool:
    """Whether rank 0 of a run may still live. A lock that can be taken does not prove that it does not."""
    try:
        with store(folder).open_lock(folder / _ALIVE) as lock:
            if lock.hold(shared=True) is False:
                return True
        named = (read(folder / _ALIVE) or b"").decode(errors="replace")
    except StorageError as error:
        return error.errno not in ABSENT
    return not (is_gone(named) or store(folder).has_stood_still(folder))


def _follow(root: Location, process: str, size: int, timeout: float) -> str:
    """As another rank, answer every session that names this process, until one names the members; returns its run."""
    answered = set()

    def settled() -> _Session | None:
        for session in _told(root, process):
            if session.members is not None or session.missing is not None:
                return session
            if session.run not in answered:
                answered.add(session.run)
                answer = root / session.run / _ANSWERS / process
                # absent: the rank 0 of that run has given up, and another one will write a session
                try:
                    store(answer).touch(answer)
                except StorageError as error:
                    if error.errno != errno.ENOENT:
                        raise
        return None

    session = until(settled, time.monotonic() + timeout, slowest(size))
    if session is None:
        raise RanksMissingError(f"{root}: rank 0 did not come within {timeout:.3g} s", ranks=(0,))
    if session.members is None:
        raise RanksMissingError(session.failure, ranks=session.missing or ())
    if process not in session.members:
        raise SettingsError(f"rank: another process in {root} says that it is rank {_rank_of(process)}, too")
    return session.run
