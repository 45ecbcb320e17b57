"""Finds the ranks of one host that load columns of the same matrices. They divide these reads."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from datastates._base.packing import pack, unpack
from datastates.adapters.dcp.load.read_items import nbytes_of
from datastates.ranks.neighbours import by_host, host_name, ranks_beside, ranks_in
from datastates.ranks.together import settle
from datastates.ranks.world import World
from datastates.reading.exchange import MINIMUM, PATIENCE, patience_of


@dataclass(frozen=True, slots=True)
class Offer:
    """A rank's message to rank 0, in its plan: it wants enough columns to divide the reads. Names its host."""

    host: str

    @classmethod
    def of(cls, places: Iterable[tuple[ReadItem, _StorageInfo]], metadata: Metadata) -> Offer | None:
        """The offer of a rank that wants these items; None if it makes none."""
        nbytes = sum(nbytes_of(item, place, metadata) for item, place in places if _has_gaps(item, metadata))
        try:
            return cls(host_name()) if nbytes >= MINIMUM else None
        except OSError:  # the system has no such names
            return None


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The answer of rank 0 to a rank: the ranks that divide reads with it.

    Attributes:
        name: The name of the exchange.
        rank: The number of this rank.
        ranks: The numbers of all ranks that take part, this one included.
        patience: Seconds to wait for a rank that makes no progress.
    """

    name: str
    rank: int
    ranks: tuple[int, ...]
    patience: float


def introduce(offers: Mapping[int, Offer]) -> dict[int, Neighbours]:
    """The neighbours of each rank that made an offer and has others of its host beside it."""
    name, found = secrets.token_hex(8), dict[int, Neighbours]()
    for ranks in map(ranks_in, by_host({rank: offer.host for rank, offer in offers.items()})):
        if len(ranks) > 1:
            found |= {rank: Neighbours(name, rank, ranks, PATIENCE) for rank in ranks}
    return found


def agree(world: World, error: BaseException | None, offer: Offer | None) -> Neighbours | None:
    """Introduce ranks that exchange no plans. All ranks call it.

    Args:
        world: The ranks.
        error: The error that keeps this rank from going on, or None.
        offer: The offer of this rank.

    Returns:
        The neighbours of this rank; None if it has none.

    Raises:
        BaseException: ``error``, or another error that :func:`~datastates.ranks.together.settle` raises.
    """

    def decide(told: dict[int, bytes]) -> bytes:
        hosts = {rank: host.decode() for rank, host in told.items() if host}
        return bytes(pack([secrets.token_hex(8), by_host(hosts)]))

    name, hosts = unpack(settle(world, "neighbours", error, b"" if offer is None else offer.host.encode(), decide))
    ranks = ranks_beside(world.rank, hosts)
    return Neighbours(name, world.rank, ranks, patience_of(world.timeout)) if len(ranks) > 1 else None


def _has_gaps(item: ReadItem, metadata: Metadata) -> bool:
    """Whether the elements that an item wants of a stored part have gaps between them, as columns of a matrix have."""
    index = item.storage_index
    kind: Any = metadata.state_dict_metadata.get(index.fqn)
    if not isinstance(kind, TensorStorageMetadata):
        return False
    hint, offset = index.index, index.offset
    if hint is None or hint >= len(kind.chunks) or kind.chunks[hint].offsets != offset:
        stored = next((chunk for chunk in kind.chunks if chunk.offsets == offset), None)
    else:
        stored = kind.chunks[hint]
    if stored is None:
        return False
    cut = [d for d, (wanted, whole) in enumerate(zip(item.lengths, stored.sizes, strict=True)) if wanted != whole]
    return bool(cut) and math.prod(item.lengths[: cut[-1]]) > 1
