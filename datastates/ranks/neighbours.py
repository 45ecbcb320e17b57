"""Connects ranks of one host with each other, over Unix sockets."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import time
from collections.abc import Collection
from pathlib import Path

_PART = 64 * 1024
"""Most bytes of a message. A socket takes some of these without anybody reading."""
_NUMBER = struct.Struct("<q")
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


class Listener:
    """Where a rank's neighbours, the other ranks of its host, connect to it. Not thread-safe.

    The socket has a name in the host's network namespace, and no file. Only processes of the same user are connected.

    Attributes:
        host: Names the host: equal for ranks that can connect to each other.
    """

    def __init__(self, name: str, rank: int, timeout: float) -> None:
        """Begin to listen.

        Args:
            name: A name that the ranks have in common, and no others.
            rank: The number of this rank.
            timeout: Seconds to wait for all neighbours to connect, and for each message.

        Raises:
            OSError: The system has no such sockets, or this rank's name is taken.
        """
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        self.host = f"{boot} {os.stat('/proc/self/ns/net').st_ino} {os.geteuid()}"
        self._name, self._rank, self._timeout = name, rank, timeout
        self._socket = self._new_socket()
        try:
            self._socket.bind(self._address(rank))
            self._socket.listen(socket.SOMAXCONN)
        except BaseException:
            self._socket.close()
            raise

    def _new_socket(self) -> socket.socket:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        made.settimeout(self._timeout)
        return made

    def _address(self, rank: int) -> str:
        return f"\0datastates-{self._name}-{rank}"

    def connect(self, ranks: Collection[int]) -> dict[int, socket.socket]:
        """Connect to each of these ranks, all of which do the same meanwhile. The caller closes the sockets.

        Raises:
            OSError: A rank cannot be reached, or does not come in time.
        """
        with contextlib.ExitStack() as failed:
            connected: dict[int, socket.socket] = {}
            for rank in ranks:
                if rank < self._rank:
                    one = connected[rank] = failed.enter_context(self._new_socket())
                    one.connect(self._address(rank))
                    if not _is_ours(one):
                        raise PermissionError(errno.EACCES, "another user listens in place of a neighbour")
                    one.sendall(_NUMBER.pack(self._rank))
            missing, end = {rank for rank in ranks if rank > self._rank}, time.monotonic() + self._timeout
            while missing:
                self._socket.settimeout(max(end - time.monotonic(), 1e-3))
                one, _ = self._socket.accept()
                failed.enter_context(one)
                if not _is_ours(one):
                    one.close()
                    continue
                one.settimeout(self._timeout)
                rank = _number(one)
                if rank not in missing:
                    raise ConnectionError(f"rank {rank} is not expected")
                missing.remove(rank)
                connected[rank] = one
            failed.pop_all()
        return connected

    def swap(self, connected: dict[int, socket.socket], message: bytes) -> dict[int, bytes]:
        """Send a message to all neighbours, and receive theirs; raises OSError."""
        received = {}
        # in this order, no ranks wait for each other in a circle
        for rank in sorted(connected):
            if rank < self._rank:
                received[rank] = _receive(connected[rank])
            _send(connected[rank], message)
            if rank > self._rank:
                received[rank] = _receive(connected[rank])
        return received

    def close(self) -> None:
        """Stop listening. What is connected stays connected."""
        self._socket.close()


def _is_ours(connected: socket.socket) -> bool:
    """Whether the other end belongs to the user of this process."""
    said = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(said)[1] == os.geteuid())


def _send(to: socket.socket, message: bytes) -> None:
    to.sendall(_NUMBER.pack(len(message)))
    for at in range(0, len(message), _PART):
        to.sendall(message[at : at + _PART])


def _receive(source: socket.socket) -> bytes:
    left = _number(source)
    parts = []
    while left > 0:
        parts.append(source.recv(_PART))
        if not parts[-1]:
            raise ConnectionResetError("a neighbour has closed its connection")
        left -= len(parts[-1])
    return b"".join(parts)


def _number(source: socket.socket) -> int:
    said = source.recv(_NUMBER.size)
    if len(said) != _NUMBER.size:
        raise ConnectionResetError("a neighbour has closed its connection")
    return int(_NUMBER.unpack(said)[0])
