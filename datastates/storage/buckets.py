"""Buckets of S3, Google Cloud Storage and Azure, through obstore: the one file that calls it.

Credentials, endpoints and regions are found as obstore finds them: in the variables of the environment that it
documents, such as ``AWS_ENDPOINT_URL`` and ``AWS_TIMEOUT``, and by the services of the machine. No options of a client
are given: obstore 0.12.1 then forgets those of the environment.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib.util
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
from typing_extensions import Buffer, override

from datastates._base.tasks import Task
from datastates._base.workers import Workers
from datastates.errors import DatastatesError, StorageError, UncertainError
from datastates.storage.location import Location
from datastates.storage.objects import Entry, Store, Traits, Writer, absent

SCHEMES = ("s3", "gs", "az", "abfs", "abfss")
PATIENCE = 60.0
"""Seconds for which a request is sent again while a server is silent or busy, but for one that creates an object."""
_Answer = TypeVar("_Answer")
_PIECE = 8 << 20
_PARTS_AT_ONCE = 12
"""Parts of one object that are uploaded at a time."""
_MOST_PARTS = 9000
"""Parts of one object: stores take at most 10,000."""
_FEW = 3
"""From so many objects of a folder on, their lengths are taken from a list of the folder."""
_LONGEST_NAME = 200
_BUCKET = re.compile(r"(?:\w+://|abfss?://[\w.$-]+@)[\w.-]+\Z", re.ASCII)
_STATUS = re.compile(r"status code: \d+ [\w ]+|HTTP error: [\w :]+")
_DENIED = re.compile(r"status code: 40[13]\b")
_GARBLED = re.compile(r"body error|invalid list response")
_CODE = re.compile(r"<Code>(\w+)</Code>")


class Buckets(Store):
    """The objects of all buckets that this process can reach.

    Two writers must not make one name in pieces at the same time: stores do not refuse the second one.
    """

    traits = Traits(best_piece=_PIECE)

    def __init__(self, patience: float = PATIENCE) -> None:
        """Begin without connections; ``patience`` is in seconds, see :data:`PATIENCE`."""
        self._patience = patience
        self._lock = threading.Lock()
        self._clients: dict[tuple[str, bool], Any] = {}
        self._process = os.getpid()

    @override
    def look(self, path: Location) -> Entry | None:
        return self.file(path) or (Entry("folder", 0, 0, None) if self.is_folder(path) else None)

    @override
    def file(self, path: Location) -> Entry | None:
        if key := self._key("look", path):
            with _told("look", path), contextlib.suppress(FileNotFoundError):
                return _entry(_obstore().head(self._client(path), key))
        return None

    @override
    def is_folder(self, path: Location) -> bool:
        key = self._key("look", path)
        with _told("look", path):
            return _again(lambda: any(_obstore().list(self._client(path), key or None, chunk_size=1))) or not key

    @override
    def lengths(self, paths: Sequence[Location]) -> list[int | None]:
        folders = {path.parent for path in paths}
        if len(folders) * _FEW > len(paths):
            return super().lengths(paths)
        there = {folder: self.entries(folder) for folder in folders}
        found = (there[path.parent].get(path.name) for path in paths)
        return [None if one is None or one.kind != "file" else one.nbytes for one in found]

    @override
    def entries(self, folder: Location, *, deep: bool = False) -> dict[str, Entry]:
        key = self._key("list", folder)
        begin = len(key) + bool(key)
        found: dict[str, Entry] = {}
        with _told("list", folder):
            if deep:
                pages = _again(lambda: [*_obstore().list(self._client(folder), key or None)])
            else:
                page = _again(lambda: _obstore().list_with_delimiter(self._client(folder), key or None))
                found = {name[begin:].rstrip("/"): Entry("folder", 0, 0, None) for name in page["common_prefixes"]}
                pages = [page["objects"]]
            found.update((one["path"][begin:], _entry(one)) for page in pages for one in page)
        found.pop("", None)  # the mark of an empty folder, as consoles make it
        return found

    @override
    def read(self, path: Location, offset: int, nbytes: int) -> bytes:
        return bytes(self._range(path, offset, nbytes))

    @override
    def read_into(self, path: Location, spans: Sequence[tuple[int, memoryview]]) -> None:
        for offset, into in spans:  # NumPy copies without the lock of the interpreter
            np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(self._range(path, offset, len(into)), np.uint8))

    def _range(self, path: Location, offset: int, nbytes: int) -> memoryview:
        """A range of an object, in obstore's memory."""
        if nbytes == 0:  # obstore refuses an empty range
            return memoryview(b"")
        key = self._key("read", path)
        with _told("read", path):
            data = memoryview(_obstore().get_range(self._client(path), key, start=offset, length=nbytes))
        if len(data) != nbytes:
            raise StorageError(0, "read", str(path), f"read {path}: it ends before {offset + nbytes}")
        return data

    @override
    def ending(self, path: Location, most: int, expected: int | None = None) -> tuple[int, bytes]:
        if expected:
            begin = max(0, expected - most)
            try:
                nbytes, data = self._get(path, {"range": (begin, expected)})
                if (nbytes, len(data)) == (expected, expected - begin):
                    return nbytes, data
            except StorageError as error:  # a server refuses a range that begins after the end
                if error.errno != 0:
                    raise
        return super().ending(path, most)

    @override
    def read_all(self, path: Location, most: int | None = None) -> bytes:
        nbytes, data = self._get(path, {}, most)
        if len(data) != nbytes:
            raise StorageError(0, "read", str(path), f"read {path}: it ends before {nbytes}")
        return data

    def _get(self, path: Location, options: dict[str, Any], most: int | None = None) -> tuple[int, bytes]:
        """The length of an object, and the bytes that the options want; raises StorageError for one too long."""
        key = self._key("read", path)
        with _told("read", path):
            found = _obstore().get(self._client(path), key, options=options)
            if most is not None and found.meta["size"] > most:
                raise StorageError(errno.EFBIG, "read", str(path))
            return found.meta["size"], bytes(found.bytes())

    @override
    def create(self, path: Location, data: bytes) -> None:
        key = self._key("create", path)
        with _told("create", path, decides=True):
            _obstore().put(self._client(path, decides=True), key, data, mode="create", use_multipart=False)

    @override
    def replace(self, path: Location, data: bytes) -> None:
        key = self._key("write", path)
        with _told("write", path):
            _obstore().put(self._client(path), key, data, use_multipart=False)

    @override
    def writer(self, path: Location) -> Writer:
        key = self._key("create", path)
        if self.exists(path):
            raise StorageError(errno.EEXIST, "create", str(path))
        with _told("create", path):
            return _Pieces(path, _obstore().open_writer(self._client(path), key, buffer_size=_PIECE))

    @override
    def upload(self, path: Location, pieces: Iterator[Buffer], nbytes: int) -> None:
        key = self._key("create", path)
        part = -(-max(nbytes, 1) // (_MOST_PARTS * _PIECE)) * _PIECE
        threads = Workers("datastates-pieces", 1)
        counted = _Counted(pieces)
        data = b"".join(counted) if nbytes <= part else _Elsewhere(counted, threads)
        try:
            with _told("write", path, decides=True):
                _obstore().put(self._client(path), key, data, chunk_size=part, max_concurrency=_PARTS_AT_ONCE)
        except StorageError as error:
            # where the answer to the last request is lost, servers say that the upload is absent or wrong
            if error.errno == errno.EACCES or not self._is_there(path, counted):
                raise
        finally:
            threads.stop()
            threads.join()

    def _is_there(self, path: Location, counted: _Counted) -> bool:
        """Whether all bytes have been sent, and an object has their length: only they are ever put there."""
        with contextlib.suppress(StorageError):
            return counted.ended and self.length_if_there(path) == counted.nbytes
        return False

    @override
    def discard(self, paths: Sequence[Location]) -> None:
        for path in paths:
            key = self._key("remove", path)
            with _told("remove", path), contextlib.suppress(FileNotFoundError):
                _again(functools.partial(_obstore().delete, self._client(path), key))

    def _client(self, path: Location, *, decides: bool = False) -> Any:
        """A bucket's client in obstore; ``decides``: one that sends nothing twice."""
        if self._process != os.getpid():
            raise StorageError(
                0, "open", str(path), f"open {path}: a forked process cannot use its parent's connections: spawn it"
            )
        root = "/".join(str(path).split("/", 3)[:3])
        if not _BUCKET.match(root):  # perhaps with credentials, which no error may show
            text = f"open {path.scheme}: no bucket has this name. Give {path.scheme}://BUCKET/NAME: servers, ports and "
            text += "credentials are taken from the environment"
            raise StorageError(errno.EINVAL, "open", f"{path.scheme}:", text)
        with self._lock:
            if (client := self._clients.get((root, decides))) is None:
                client = self._clients[root, decides] = importlib.import_module("obstore.store").from_url(
                    root,
                    **(_for_s3() if path.scheme == "s3" else {}),
                    retry_config={
                        "max_retries": 0 if decides else 100,
                        "retry_timeout": timedelta(seconds=self._patience),
                        "backoff": {"max_backoff": timedelta(seconds=1)},
                    },
                )
        return client

    def _key(self, operation: str, path: Location) -> str:
        """The name of an object in its bucket; raises StorageError for one that stores take for another name."""
        key = "/".join(str(path).split("/", 3)[3:])
        for name in key.split("/"):
            if name == ".." or len(name.encode()) > _LONGEST_NAME or any(c in "%\\" or c < " " for c in name):
                raise StorageError(
                    errno.EINVAL,
                    operation,
                    str(path),
                    f"{operation} {path}: not every store keeps the name {name!r:.60} as it is: give one of at most "
                    f"{_LONGEST_NAME} bytes without '%', a backslash and '..'",
                )
        return key


@functools.cache
def every_bucket() -> Buckets:
    """The store of all buckets of this process; raises ValueError if obstore is not installed."""
    if importlib.util.find_spec("obstore") is None:
        raise ValueError("buckets are read through obstore: pip install 'datastates[stores]'")
    return Buckets()


class _Counted:
    """Pieces of an object, and what is known of those that were taken.

    Attributes:
        nbytes: Their length.
        ended: Whether there are no more.
    """

    def __init__(self, pieces: Iterator[Buffer]) -> None:
        self._pieces = pieces
        self.nbytes, self.ended = 0, False

    def __iter__(self) -> _Counted:
        return self

    def __next__(self) -> Buffer:
        try:
            piece = next(self._pieces)
        except StopIteration:
            self.ended = True
            raise
        self.nbytes += memoryview(piece).nbytes
        return piece


class _Elsewhere:
    """Takes pieces on a thread of its own: on the thread that takes them for obstore, no request can be made."""

    def __init__(self, pieces: Iterator[Buffer], threads: Workers) -> None:
        self._pieces, self._threads = pieces, threads

    def __iter__(self) -> _Elsewhere:
        return self

    def __next__(self) -> Buffer:
        piece: Task[Buffer] = Task(self._pieces.__next__)
        self._threads.put(piece)
        return piece.result()


class _Pieces(Writer):
    """An object that is uploaded in parts, and is there when it is finished."""

    def __init__(self, path: Location, upload: Any) -> None:
        self._path, self._upload, self._at = path, upload, 0

    @override
    def write(self, data: Any, offset: int) -> None:
        if offset != self._at:
            raise ValueError(f"{self._path}: a piece for {offset} after {self._at} bytes")
        with _told("write", self._path):
            self._upload.write(bytes(data))  # obstore keeps what it is given until a part is full
        self._at += len(data)

    @override
    def finish(self) -> None:
        upload, self._upload = self._upload, None
        with _told("write", self._path, decides=True):
            upload.close()

    @override
    def close(self) -> None:
        upload, self._upload = self._upload, None
        if upload is not None:
            with _told("abort", self._path), contextlib.suppress(_Left), upload:
                raise _Left


class _Left(Exception):
    """Ends an upload without an object: an error in its block aborts it."""


class _told:  # named as a statement, as contextlib.suppress is
    """A block in which an error of obstore becomes a StorageError of one line, which has no address of a server."""

    def __init__(self, operation: str, path: Location, *, decides: bool = False) -> None:
        """``decides``: an error that does not tell whether the object was made becomes an UncertainError."""
        self._operation, self._path, self._decides = operation, path, decides

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Raise the error of the block."""
        known = importlib.import_module("obstore.exceptions")
        if isinstance(error, (DatastatesError, _Left)) or not isinstance(error, (known.BaseError, OSError, ValueError)):
            return
        numbers = {
            FileNotFoundError: errno.ENOENT,
            known.AlreadyExistsError: errno.EEXIST if self._decides else 0,  # each 409 is one
            known.PermissionDeniedError: errno.EACCES,
            known.UnauthenticatedError: errno.EACCES,
        }
        number = next((number for kind, number in numbers.items() if isinstance(error, kind)), 0)
        if _DENIED.search(str(error)):  # whose kind a list, a removal and a writer do not tell
            number = errno.EACCES
        if number == errno.ENOENT and (self._decides, self._operation) == (True, "write"):
            number = 0  # the end of an upload was sent again, and found it done
        if number == errno.ENOENT:
            raise absent(self._operation, self._path) from None
        text = f"{self._operation} {self._path}: {_reason(str(error))}"
        uncertain = self._decides and number == 0
        raise (UncertainError if uncertain else StorageError)(number, self._operation, str(self._path), text) from None


def _for_s3() -> dict[str, bool]:
    """Settings of S3, and of servers of its protocol."""
    given = {name.upper() for name in os.environ}
    # a hash of all that is sent takes most of an upload's processor time, and TLS makes it needless
    unsigned = {"AWS_ALLOW_HTTP", "AWS_UNSIGNED_PAYLOAD"}.isdisjoint(given)
    # not every server removes many at once
    return {"disable_bulk_delete": True, **({"unsigned_payload": True} if unsigned else {})}


def _again(call: Callable[[], _Answer]) -> _Answer:
    """Call again if the answer was cut or garbled, for what may be done twice. obstore reads on in objects only."""
    try:
        return call()
    except importlib.import_module("obstore.exceptions").GenericError as error:
        if not _GARBLED.search(str(error)):
            raise
        return call()


def _reason(text: str) -> str:
    """What an error of obstore says of its cause. The rest of its text names the server, and may have signatures."""
    if said := _STATUS.search(text):
        return ", ".join([said[0].removeprefix("status code: "), *_CODE.findall(text)[:1]])
    return re.sub(r"\w+://\S+", "the server", text.partition("\n")[0])[:200]


def _entry(found: Any) -> Entry:
    """Describe an object as obstore found it."""
    tag = str(found["e_tag"] or "").strip('"')  # Azure lists it without quotes
    changed = round(found["last_modified"].timestamp()) * 10**9
    return Entry("file", found["size"], changed, (tag, changed, found["size"]))


def _obstore() -> ModuleType:
    return importlib.import_module("obstore")
