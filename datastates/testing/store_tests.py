"""The tests that every store must pass; subclass them in a file that pytest collects."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator

import pytest

from datastates._base.tasks import each
from datastates.errors import StorageError
from datastates.storage import Location, Store

_CALLERS = 8


class StoreTests:
    """Tests of what a store promises.

    Write ``class TestMine(StoreTests)`` and define :meth:`make`.
    """

    def make(self) -> tuple[Store, Location]:
        """Return the store, and a location in it with nothing below, for one test."""
        raise NotImplementedError

    def prepare(self, folder: Location) -> None:
        """Make what must be there before an object is made below a location. A store of objects needs nothing."""

    @pytest.fixture(autouse=True)
    def _made(self) -> Iterator[None]:
        self.store, self.root = self.make()
        yield
        self.store.discard([self.root / name for name in self.store.entries(self.root, deep=True)])

    def _fails(self, number: int, path: Location, call: Callable[[], object]) -> None:
        with pytest.raises(StorageError) as caught:
            call()
        assert (caught.value.errno, caught.value.filename) == (number, str(path))
        assert str(path) in str(caught.value), "an error names its object"

    def test_what_was_made_is_read(self) -> None:
        """``create`` returns when the object is there; ranges of it are exact."""
        path = self.root / "a"
        self.store.create(path, b"0123456789")
        assert self.store.read(path, 2, 3) == b"234"
        assert self.store.read_all(path) == self.store.read_all(path, 10) == b"0123456789"
        assert (self.store.head(path, 4), self.store.head(path, 40)) == (b"0123", b"0123456789")

    def test_spans_are_read_into_memory(self) -> None:
        """``read_into`` fills each memory with its span."""
        data = bytes(range(256)) * 64
        self.store.create(self.root / "a", data)
        parts = [(offset, bytearray(100)) for offset in range(0, len(data) - 100, 997)]
        self.store.read_into(self.root / "a", [(offset, memoryview(into)) for offset, into in parts])
        assert all(into == data[offset : offset + 100] for offset, into in parts)
        with pytest.raises(StorageError):
            self.store.read_into(self.root / "a", [(at, memoryview(bytearray(1))) for at in (0, len(data))])

    def test_no_range_is_cut_short(self) -> None:
        """A range that ends after the object is an error, and never fewer bytes."""
        self.store.create(self.root / "a", b"0123")
        for offset, nbytes in ((2, 3), (9, 1)):
            with pytest.raises(StorageError):
                self.store.read(self.root / "a", offset, nbytes)
        self._fails(errno.EFBIG, self.root / "a", lambda: self.store.read_all(self.root / "a", 3))

    def test_the_end_of_an_object(self) -> None:
        """``ending`` gives the length and the last bytes, whatever length was expected."""
        path = self.root / "a"
        self.store.create(path, b"0123456789")
        assert self.store.ending(path, 40) == (10, b"0123456789")
        none = self.root / "none"
        self._fails(errno.ENOENT, none, lambda: self.store.ending(none, 4))
        self._fails(errno.ENOENT, none, lambda: self.store.ending(none, 4, 10))
        for expected in (None, 10, 7, 3, 12, 40):
            assert self.store.ending(path, 4, expected) == (10, b"6789")

    def test_what_is_absent(self) -> None:
        """Looking finds nothing, reading fails with ENOENT, and discarding is no error."""
        none = self.root / "none"
        assert self.store.look(none) is None
        assert self.store.file(none) is None
        assert self.store.length_if_there(none) is None
        assert not any(found(none) for found in (self.store.exists, self.store.is_file, self.store.is_folder))
        assert self.store.entries(none) == self.store.entries(none, deep=True) == {}
        self.store.discard([none])
        self._fails(errno.ENOENT, none, lambda: self.store.length(none))
        self._fails(errno.ENOENT, none, lambda: self.store.read_all(none))
        self._fails(errno.ENOENT, none, lambda: self.store.read(none, 0, 1))

    def test_lists_show_what_was_made(self) -> None:
        """A list has each object below a location, with its length; without ``deep``, each first name once."""
        made = {"a": 1, "b/c": 2, "b/d/e": 3, "bb": 4}
        for name, nbytes in made.items():
            self.prepare((self.root / name).parent)
            self.store.create(self.root / name, bytes(nbytes))
        deep = self.store.entries(self.root, deep=True)
        assert {name: (entry.kind, entry.nbytes) for name, entry in deep.items()} == {
            name: ("file", nbytes) for name, nbytes in made.items()
        }
        assert self.store.entries(self.root / "b", deep=True).keys() == {"c", "d/e"}
        kinds = {name: entry.kind for name, entry in self.store.entries(self.root).items()}
        assert kinds == {"a": "file", "b": "folder", "bb": "file"}
        assert sorted(self.store.names(self.root)) == ["a", "b", "bb"]
        assert self.store.is_folder(self.root / "b")
        assert not self.store.is_file(self.root / "b")
        assert deep["b/c"] == self.store.look(self.root / "b" / "c") == self.store.file(self.root / "b" / "c")

    def test_lengths_of_many(self) -> None:
        """``lengths`` gives None for what is absent."""
        for n in range(40):
            self.store.create(self.root / str(n), bytes(n))
        assert self.store.lengths([self.root / str(n) for n in range(41)]) == [*range(40), None]

    def test_one_of_many_makes_an_object(self) -> None:
        """Of several callers of ``create``, one makes the object, and its bytes stay."""
        path, together = self.root / "a", threading.Barrier(_CALLERS)

        def make(number: int) -> int:
            together.wait()
            try:
                self.store.create(path, str(number).encode())
            except StorageError as error:
                return int(error.errno or -1)
            return 0

        results = each(make, range(_CALLERS), _CALLERS)
        assert sorted(results) == [0] + [errno.EEXIST] * (_CALLERS - 1)
        assert self.store.read_all(path) == str(results.index(0)).encode()
        self._fails(errno.EEXIST, path, lambda: self.store.create(path, b"late"))

    def test_what_is_replaced_has_another_version(self) -> None:
        """``replace`` makes an object, or a new one in its place."""
        path = self.root / "a"
        self.store.replace(path, b"old")
        before = self.store.look(path)
        self.store.replace(path, b"newer")
        after = self.store.look(path)
        assert self.store.read_all(path) == b"newer"
        assert before is not None
        assert after is not None
        assert before.version != after.version
        assert before.changed <= after.changed
        assert self.store.names(self.root) == ["a"]

    def test_pieces_make_an_object(self) -> None:
        """A writer's object is there, whole, when it is finished. One that is closed before is not there.

        What has been written may change in memory.
        """
        pieces = [b"one" * 1000, b"two", b"", b"three" * 500]
        for name in ("finished", "left"):
            writer, at = self.store.writer(self.root / name), 0
            for piece in pieces:
                memory = bytearray(piece)
                writer.write(memoryview(memory), at)
                memory[:] = bytes(len(piece))
                at += len(piece)
            if name == "finished":
                writer.finish()
            writer.close()
            writer.close()
        assert self.store.read_all(self.root / "finished") == b"".join(pieces)
        assert self.store.names(self.root) == ["finished"]

    def test_a_writer_replaces_nothing(self) -> None:
        """A writer fails with EEXIST, at its begin or its end, where an object is."""
        path = self.root / "a"
        self.store.create(path, b"first")

        def write() -> None:
            writer = self.store.writer(path)
            try:
                writer.write(b"second", 0)
                writer.finish()
            finally:
                writer.close()

        self._fails(errno.EEXIST, path, write)
        assert self.store.read_all(path) == b"first"

    def test_uploads(self) -> None:
        """An upload of pieces that come one by one is there, whole, when it is done, also a long one."""
        for number, sizes in enumerate(([0], [1, 0, 2], [5 << 20, 1, 9 << 20, 3 << 20])):
            path, data = self.root / str(number), [bytes([i + 1]) * size for i, size in enumerate(sizes)]
            self.store.upload(path, iter(data), sum(sizes))
            assert self.store.length(path) == sum(sizes)
            assert self.store.read_all(path) == b"".join(data)

    def test_pieces_may_be_read_from_the_store(self) -> None:
        """The pieces of an upload may be those of another object, which are read as they are taken."""
        data = [bytes([i + 1]) * (9 << 20) for i in range(2)]
        self.store.upload(self.root / "a", iter(data), 18 << 20)
        pieces = (self.store.read(self.root / "a", i * (9 << 20), 9 << 20) for i in range(2))
        self.store.upload(self.root / "b", pieces, 18 << 20)
        assert self.store.read_all(self.root / "b") == b"".join(data)

    def test_an_upload_that_fails_leaves_nothing(self) -> None:
        """No object is there where the pieces end by an error."""

        def pieces() -> Iterator[bytes]:
            yield b"1" * (9 << 20)
            yield b"2" * (9 << 20)
            raise StorageError(errno.EIO, "read", "elsewhere")

        for nbytes in (1, 18 << 20):
            with pytest.raises(StorageError):
                self.store.upload(self.root / "a", pieces(), nbytes)
            assert self.store.names(self.root) == []

    def test_discarding_many(self) -> None:
        """``discard`` removes what is there of many."""
        for name in ("a", "b", "c"):
            self.store.create(self.root / name, b"1")
        self.store.discard([self.root / name for name in ("a", "none", "c")])
        assert self.store.names(self.root) == ["b"]

    def test_the_clock_goes_on(self) -> None:
        """The time of a new object is no earlier than that of an older one."""
        times = []
        for name in ("a", "b", "c"):
            self.store.create(self.root / name, b"1")
            made = self.store.look(self.root / name)
            assert made is not None
            times.append(made.changed)
        assert times == sorted(times)
