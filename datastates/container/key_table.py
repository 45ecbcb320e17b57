"""The keys of an index, packed end to end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np

from datastates._base.columns import I64, U32
from datastates.errors import FormatError


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


class PackedKeys(Sequence[str]):
    """Strings as UTF-8 (with lone surrogates) and their lengths in bytes. Immutable.

    Attributes:
        data: The strings, end to end.
        nbytes: Length of each.
    """

    def __init__(self, data: bytes, nbytes: U32) -> None:
        """Keep data and lengths; raises FormatError if the lengths do not add up or a string is not valid UTF-8."""
        self.data = data
        self.nbytes = nbytes
        self._end: I64 = np.cumsum(nbytes, dtype=np.int64)
        if (int(self._end[-1]) if len(nbytes) else 0) != len(data):
            raise FormatError("index: the lengths of the keys do not add up")
        self._check_text()

    @classmethod
    def of(cls, strings: Sequence[str]) -> PackedKeys:
        """Pack strings; returns packed ones as they are."""
        if isinstance(strings, PackedKeys):
            return strings
        text = "".join(strings)
        if text.isascii():
            return cls(text.encode(), np.fromiter(map(len, strings), np.uint32, len(strings)))
        encoded = [_encode(s) for s in strings]
        return cls(b"".join(encoded), np.fromiter(map(len, encoded), np.uint32, len(encoded)))

    def _check_text(self) -> None:
        if self.data.isascii():
            return
        try:
            self.data.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise FormatError(f"index: the keys are not text ({error.reason})") from None
        # the whole is valid, and so is each string unless one begins within a character
        start = (self._end - self.nbytes)[self.nbytes > 0]
        if (np.frombuffer(self.data, np.uint8)[start] & 0xC0 == 0x80).any():
            raise FormatError("index: the keys are not text (one ends within a character)")

    def __len__(self) -> int:
        """The number of strings."""
        return len(self.nbytes)

    @overload
    def __getitem__(self, i: int) -> str: ...
    @overload
    def __getitem__(self, i: slice) -> list[str]: ...
    def __getitem__(self, i: int | slice) -> str | list[str]:
        """The string with this number, or the strings in a slice."""
        if isinstance(i, slice):
            return [self[n] for n in range(*i.indices(len(self)))]
        end = int(self._end[i])
        return self.data[end - int(self.nbytes[i]) : end].decode("utf-8", "surrogatepass")

    def __iter__(self) -> Iterator[str]:
        """Iterate over all strings."""
        return iter(self.some(np.arange(len(self))))

    def some(self, numbers: I64) -> list[str]:
        """The strings with these numbers."""
        end, data = self._end[numbers], self.data
        begin = (end - self.nbytes[numbers]).tolist()
        return [data[a:b].decode("utf-8", "surrogatepass") for a, b in zip(begin, end.tolist(), strict=True)]
