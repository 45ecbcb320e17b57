"""Brings containers that a restore needs from other hosts, to the directory of the host that needs them."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence

from datastates._base import log
from datastates.commit import manifest
from datastates.commit.carry import SILENCE, MakeLink, receive, send
from datastates.commit.hosts import Hosts
from datastates.commit.manifest import named_of
from datastates.commit.names import Identity, nowhere
from datastates.commit.partners import Transfer, plan
from datastates.commit.stock import Known
from datastates.errors import DatastatesError, RestoreError, said
from datastates.storage.location import Location


class ElsewhereError(RestoreError):
    """Containers that are needed are on other hosts only.

    Attributes:
        ranks: The ranks that wrote them.
    """

    def __init__(self, message: str, *, ranks: Sequence[int]) -> None:
        """Store the message and the ranks."""
        super().__init__(message)
        self.ranks = list(ranks)


class Gathering:
    """The containers that one restore brings from other hosts, as one rank knows them. Not thread-safe.

    The restore fails where containers are needed, the ranks tell rank 0 which, it plans, all bring them, and the
    restore begins again. A container that is damaged here is brought, too.
    """

    def __init__(self, root: Location, hosts: Hosts, known: Mapping[Identity, Known], link: MakeLink | None) -> None:
        """Begin; nothing is brought yet.

        Args:
            root: The place of the checkpoints.
            hosts: The ranks of each directory.
            known: What the directories hold.
            link: Makes links between ranks; None where nothing can be brought.
        """
        self._root, self._hosts, self._known, self._link = root, hosts, known, link
        self._origins: dict[Location, str] = {}
        self._given_up: set[tuple[Location, int]] = set()  # what no other host can give
        # on rank 0: the leaders that have no whole container for this, and by receiver who was to send it last
        self._lacking: set[tuple[int, int]] = set()
        self._last: dict[tuple[int, int], int] = {}

    def refuse(self, path: Location, ranks: Collection[int], *, lost: bool = False) -> None:
        """Raise ElsewhereError if containers of a checkpoint, by the rank that wrote them, may be on another host.

        ``lost``: They are in no other place. Raises RestoreError then if they cannot be brought either.
        """
        if path.parent != self._root or (known := self._known.get(_identity(path))) is None:
            return
        holders = {rank: known.elsewhere(rank, self._hosts.leader) for rank in ranks}
        away = [rank for rank, leaders in holders.items() if leaders]
        asked = [] if self._link is None else [rank for rank in away if (path, rank) not in self._given_up]
        if not asked and not (lost and away):
            return
        first = (asked or away)[0]
        what = f"{manifest.container_name(first)} of step {_identity(path)[0]}"
        text = elsewhere(what, self._hosts, {*holders[first]})
        raise ElsewhereError(text, ranks=asked) if asked else RestoreError(text)

    def plan(self, path: Location, needs: Mapping[int, Sequence[int]]) -> list[Transfer]:
        """On rank 0, how to bring the containers that ranks need and that are missing or damaged where they are."""
        if self._link is None or path.parent != self._root or (known := self._known.get(_identity(path))) is None:
            return []
        wanted: dict[tuple[int, int], int] = {}
        for rank, containers in sorted(needs.items()):
            for one in containers:
                wanted.setdefault((one, self._hosts.leaders[rank]), rank)
        self._lacking |= wanted.keys() | {(one[0], self._last[one]) for one in wanted if one in self._last}
        holders = {
            one: [leader for leader in known.holders.get(one, ()) if (one, leader) not in self._lacking]
            for one, _ in wanted
        }
        found = plan([(one, rank) for (one, _), rank in wanted.items() if holders[one]], holders, self._hosts)
        leaders = self._hosts.leaders
        self._last |= {(one.container, leaders[one.receiver]): leaders[one.sender] for one in found}
        return found

    def bring(self, path: Location, transfers: Sequence[Transfer], needs: Sequence[int], name: str) -> None:
        """Do this rank's part of planned transfers; a failure is logged. What no rank sends is asked for no more.

        Args:
            path: The checkpoint.
            transfers: All transfers.
            needs: The containers that this rank needs.
            name: The same on all ranks, and used once in a run.
        """
        own = self._hosts.group
        self._given_up |= {(path, one) for one in needs} - {(path, t.container) for t in transfers if t.receiver in own}
        for number, one in enumerate(transfers):
            if self._hosts.rank in (one.sender, one.receiver):
                self._carry(path, one, f"{name}/{number}")

    def _carry(self, path: Location, one: Transfer, name: str) -> None:
        sends = one.sender == self._hosts.rank
        other = one.receiver if sends else one.sender
        assert self._link is not None
        try:
            every = named_of(path, manifest.open(path), one.container)
            with contextlib.closing(self._link(name, other, SILENCE * len(every))) as link:
                for named in every:
                    if sends:
                        send(link, named)
                    else:
                        receive(link, named, anew=True)
                        self._origins[named.path] = self._hosts.places[other]
                        log.info("%s was brought from %s", named.path, self._hosts.places[other])
        except DatastatesError as error:
            what = f"{manifest.container_name(one.container)} of {path}"
            log.warning("%s was not brought from rank %d to rank %d: %s", what, one.sender, one.receiver, said(error))

    def origin(self, file: Location) -> str | None:
        """The place that a container was brought from; None if it was not."""
        return self._origins.get(file)


def elsewhere(what: str, hosts: Hosts, leaders: set[int]) -> str:
    """Says where something is that is needed here."""
    return (
        f"{what} is needed and is not in {hosts.places[hosts.rank]}, but in {hosts.named(leaders)}: start the ranks "
        "where they ran, or give a place that all of them reach in tiers="
    )


def _identity(path: Location) -> Identity:
    return nowhere(path) or ((opened := manifest.open(path)).step, opened.attempt)
