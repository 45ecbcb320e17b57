"""Connects ranks of one host with each other, over Unix sockets."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

_PART = 64 * 1024
"""Most bytes of a message. A socket buffers a few such messages before anybody reads."""
_STEP = 0.002
"""Seconds until a rank that does not listen yet is tried again."""
_NUMBER = struct.Struct("<q")
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


def host_name() -> str:
    """A name of this host, equal for ranks that can connect to each other over Unix sockets.

    Raises:
        OSError: The system does not tell the host's identity.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/net').st_ino} {os.geteuid()}"


def by_host(hosts: Mapping[int, str]) -> list[list[tuple[int, int]]]:
    """For each host, its ranks as stretches of consecutive numbers: the first number, and how many there are.

    On most systems the ranks of a host have consecutive numbers. So a host has few stretches.

    Args:
        hosts: The host of each rank.
    """
    found: dict[str, list[tuple[int, int]]] = {}
    for rank, host in sorted(hosts.items()):
        stretches = found.setdefault(host, [])
        first, count = stretches[-1] if stretches else (rank, 0)
        if first + count == rank:
            stretches[-1:] = [(first, count + 1)]
        else:
            stretches.append((rank, 1))
    return list(found.values())


def ranks_in(stretches: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """The numbers of a host's ranks, from its stretches as :func:`by_host` gives them."""
    return tuple(n for first, count in stretches for n in range(first, first + count))


def ranks_beside(rank: int, hosts: Iterable[Iterable[tuple[int, int]]]) -> tuple[int, ...]:
    """The numbers of all ranks on a rank's host, itself included, from :func:`by_host`; empty if no host has it."""
    return next((ranks for ranks in map(ranks_in, hosts) if rank in ranks), ())


class Listener:
    """A socket at which a rank's neighbours, the other ranks of its host, connect to it. Not thread-safe.

    The socket has a name in the host's network namespace, and no file. Only processes of the same user are connected.

    Attributes:
        host: Names the host, as :func:`host_name` does.
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
        self.host = host_name()
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

    def connect(self, ranks: Collection[int], within: float | None = None) -> dict[int, socket.socket]:
        """Connect to each of these ranks, which call this method, too. Returns sockets by rank; the caller closes them.

        Args:
            ranks: The ranks.
            within: Seconds in which each rank begins to listen, and connects. None if all listen already.

        Raises:
            OSError: A rank cannot be reached, or does not come in time.
        """
        end = time.monotonic() + (self._timeout if within is None else within)
        with contextlib.ExitStack() as failed:
            connected: dict[int, socket.socket] = {}
            for rank in ranks:
                if rank < self._rank:
                    one = connected[rank] = failed.enter_context(self._new_socket())
                    self._reach(one, rank, None if within is None else end)
                    if not _is_ours(one):
                        raise PermissionError(errno.EACCES, "another user listens in place of a neighbour")
                    one.sendall(_NUMBER.pack(self._rank))
            missing = {rank for rank in ranks if rank > self._rank}
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

    def _reach(self, one: socket.socket, rank: int, end: float | None) -> None:
        """Connect to a rank, which may begin to listen until ``end``."""
        while True:
            try:
                return one.connect(self._address(rank))
            except ConnectionRefusedError:
                if end is None or time.monotonic() > end:
                    raise
            time.sleep(_STEP)

    def swap(self, connected: dict[int, socket.socket], message: bytes) -> dict[int, bytes]:
        """Send a message to all connected neighbours, and receive one from each, by rank; raises OSError."""
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
        """Stop listening. Connected sockets stay connected."""
        self._socket.close()


def _is_ours(connected: socket.socket) -> bool:
    """Whether the process at the other end of a socket belongs to the user of this process."""
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
