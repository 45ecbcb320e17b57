"""Finds out which ranks share a directory that each host has for itself, by a file that the first of them makes."""

from __future__ import annotations

import contextlib
import errno
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass

from datastates._base.packing import pack, unpack
from datastates.errors import CommitError, StorageError
from datastates.ranks.world import World, settle
from datastates.storage import folders_of
from datastates.storage.location import Location

_TOKEN = ".host-"
_SHOWN = 4
"""Most places that a message names."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """The ranks by the directory that they share. Those that share one form a group; its lowest rank leads it.

    A group is most often a host. But two containers on one host may have a directory each, and two hosts may share one.

    Attributes:
        rank: This rank.
        leaders: By rank, the leader of its group.
        places: By rank, the host and the directory, for messages.
    """

    rank: int
    leaders: list[int]
    places: list[str]

    @property
    def leader(self) -> int:
        """The leader of this rank's group."""
        return self.leaders[self.rank]

    @property
    def group(self) -> list[int]:
        """The ranks of this rank's group."""
        return [rank for rank, leader in enumerate(self.leaders) if leader == self.leader]

    @property
    def machines(self) -> list[str]:
        """By rank, the machine. Two directories may be on one."""
        return [place.partition(":")[0] for place in self.places]

    def named(self, leaders: set[int]) -> str:
        """The places of some groups, for messages."""
        more = f" and {len(leaders) - _SHOWN} more" if len(leaders) > _SHOWN else ""
        return ", ".join(self.places[leader] for leader in sorted(leaders)[:_SHOWN]) + more


def together(world: World, name: str, own: Callable[[], bytes], decide: Callable[[dict[int, bytes]], bytes]) -> bytes:
    """As :func:`settle`, of what ``own`` returns or raises."""
    error, data = None, b""
    try:
        data = own()
    except Exception as failure:
        error = failure
    return settle(world, name, error, data, decide)


def find(world: World, name: str, root: Location, beside: str) -> Hosts:
    """Meet all ranks, and find out which of them see the same directory ``root``. ``beside`` is the same on all.

    Raises:
        CommitError: Another rank failed, or is not to have a directory for each host, or has another ``beside``.
        RanksMissingError: Some ranks did not come in time.
        StorageError: The directory cannot be written.
    """
    token = root / f"{_TOKEN}{world.token(name)}"

    def own() -> bytes:
        seen = f"{_seen(token, world.rank)} {socket.gethostname()} {root}"
        return f"{root.name}{beside}, with per_host: {seen}".encode(errors="backslashreplace")

    def decide(told: dict[int, bytes]) -> bytes:
        said = {rank: data.decode().partition(", with per_host: ") for rank, data in sorted(told.items())}
        for rank, (where, found, _) in said.items():
            if not found:
                raise CommitError(f"per_host: rank {rank} does not set it, and rank 0 does")
            if where != said[0][0]:
                raise CommitError(f"rank 0 writes to {said[0][0]}, but rank {rank} to {where}")
        first: dict[str, int] = {}
        seen = [seen.split(" ", 2) for _, _, seen in said.values()]
        leaders = [first.setdefault(token, rank) for rank, (token, _, _) in enumerate(seen)]
        return pack([leaders, [f"{host}:{path}" for _, host, path in seen]])

    try:
        return Hosts(world.rank, *unpack(together(world, name, own, decide)))
    finally:
        with contextlib.suppress(StorageError):
            store = folders_of(root)
            store.remove(token, missing_ok=True)
            for name in store.names(root):  # what killed processes have left
                if name.startswith(_TOKEN) and store.has_stood_still(root / name):
                    store.remove(root / name, missing_ok=True)


def _seen(token: Location, rank: int) -> str:
    """What the file ``token`` holds, which is random. The first rank that comes makes it, whole at once."""
    store, mine = folders_of(token), token.with_name(f"{token.name}-{rank}")
    store.create(mine, secrets.token_hex(8).encode())
    try:
        store.rename_new(mine, token)
    except StorageError as error:
        if error.errno != errno.EEXIST:
            raise
        store.remove(mine)
    return store.read_all(token).decode()
