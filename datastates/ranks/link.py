"""A link between two ranks: torch.distributed's own point-to-point, in a gloo group of the two that nobody else uses.

Bytes go in messages of 16 MiB at most. Each ends with its number and a CRC-32, as TCP's own checksum misses damage.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
from typing_extensions import Buffer

from datastates._base.loaded import loaded
from datastates.container.checksums import crc32
from datastates.errors import CommitError, UnreachableError

_MESSAGE = 16 << 20
_TAIL = 8
"""Bytes of the number and the CRC-32 of a message, 4 each."""
_AHEAD = 2
"""Messages that are on their way while others are filled or written."""
_USED = 2
"""Messages that are filled or written."""
_STOPPED = 0xFFFFFFFF
"""The number of a message without contents: its sender cannot go on."""


class Link:
    """One end of a link. For one thread at a time.

    After an error, close it: what is on its way is lost. A rank that is silent for the time-out ends the link, too.
    """

    def __init__(self, store: Any, name: str, rank: int, other: int, *, silence: float) -> None:
        """Wait for the other rank, which makes its end with the same name.

        Args:
            store: A ``torch.distributed.Store``, the same for both.
            name: The name of the link: used once in a run.
            rank: This rank.
            other: The other rank.
            silence: Seconds to wait for the other rank, now and at each message.

        Raises:
            UnreachableError: It has not come, or cannot be reached.
            CommitError: This build of torch has no gloo.
        """
        torch, distributed = loaded("torch"), loaded("torch.distributed")
        self.other = other
        self._other = int(other > rank)  # its rank in the group
        self._new: Callable[[int], Any] = partial(torch.empty, dtype=torch.uint8)
        if not distributed.is_gloo_available():
            raise CommitError("peers: this build of torch.distributed has no gloo")
        own = store.clone() if hasattr(store, "clone") else store  # a wait in the program's own would lock that
        place = distributed.PrefixStore(f"datastates/{name}", own)
        self._group: Any = self._reached(
            lambda: distributed.ProcessGroupGloo(place, 1 - self._other, 2, timedelta(seconds=silence))
        )

    def _reached(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:
            why = str(error).partition("\n")[0].rpartition("] ")[2]
            raise UnreachableError(f"rank {self.other} cannot be reached, or is silent: {why}") from error

    def tell(self, number: int) -> None:
        """Send a number, from 0 to 2**63 - 1."""
        message = self._new(_TAIL)
        message.numpy().view(np.int64)[0] = number
        self._wait(self._send(message))

    def hear(self) -> int:
        """Receive a number."""
        message = self._new(_TAIL)
        self._wait(self._receive(message))
        return int(message.numpy().view(np.int64)[0])

    def send(self, pieces: Iterable[Buffer], nbytes: int) -> None:
        """Send bytes, which :meth:`receive` receives.

        Args:
            pieces: The bytes. If this raises, the other rank is told, and the link has come to its end.
            nbytes: Their number.

        Raises:
            UnreachableError: The other rank is silent or gone.
            CommitError: ``pieces`` has fewer bytes.
        """
        works: list[Any] = []
        fill = _filler(pieces)
        for number, (length, message) in enumerate(self._messages(nbytes)):
            if len(works) == _AHEAD:
                self._wait(works.pop(0))
            data = message.numpy()
            try:
                fill(data[:length])
            except BaseException:
                data[length:].view(np.uint32)[:] = _STOPPED, 0
                with contextlib.suppress(UnreachableError):
                    self._wait(self._send(message))
                raise
            data[length:].view(np.uint32)[:] = number, crc32(data[:length])
            works.append(self._send(message))
        for work in works:
            self._wait(work)

    def receive(self, nbytes: int) -> Iterator[memoryview]:
        """Yield the bytes that :meth:`send` sends. A piece is valid until the next but one.

        Raises:
            UnreachableError: The other rank is silent or gone.
            CommitError: It could not go on, or what came is damaged.
        """
        messages = ((number, *one) for number, one in enumerate(self._messages(nbytes)))
        posted = [(*one, self._receive(one[-1])) for one in itertools.islice(messages, _AHEAD)]
        while posted:
            number, length, message, work = posted.pop(0)
            self._wait(work)
            data = message.numpy()
            found, crc = data[length:].view(np.uint32).tolist()
            if found == _STOPPED:
                raise CommitError(f"rank {self.other} could not send it, as its log says")
            if (found, crc) != (number, crc32(data[:length])):
                raise CommitError(f"what rank {self.other} has sent was damaged on the way")
            yield memoryview(data[:length])
            posted += [(*one, self._receive(one[-1])) for one in itertools.islice(messages, 1)]

    def _messages(self, nbytes: int) -> Iterator[tuple[int, Any]]:
        """The length and the memory of each message, which a later one shares."""
        buffers = [self._new(min(nbytes, _MESSAGE) + _TAIL) for _ in range(_AHEAD + _USED)]
        for number, begin in enumerate(range(0, nbytes, _MESSAGE)):
            length = min(_MESSAGE, nbytes - begin)
            yield length, buffers[number % len(buffers)][: length + _TAIL]

    def _send(self, message: Any) -> Any:
        return self._reached(lambda: self._group.send([message], self._other, 0))

    def _receive(self, message: Any) -> Any:
        return self._reached(lambda: self._group.recv([message], self._other, 0))

    def _wait(self, work: Any) -> None:
        self._reached(work.wait)

    def close(self) -> None:
        """End the link."""
        self._group = None


def _filler(pieces: Iterable[Buffer]) -> Callable[[Any], None]:
    """A function that fills an array of bytes with the next ones."""
    rest = memoryview(b"")
    views = filter(len, (memoryview(piece).cast("B") for piece in pieces))

    def fill(target: Any) -> None:
        nonlocal rest
        at = 0
        while at < len(target):
            rest = rest or next(views, rest)
            if not rest:
                raise CommitError(f"a file has ended {len(target) - at} bytes too early")
            length = min(len(rest), len(target) - at)
            target[at : at + length] = np.frombuffer(rest[:length], np.uint8)
            rest, at = rest[length:], at + length

    return fill
