"""Parts that several ranks restore alike: one of them reads, and torch broadcasts to the others."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import msgpack

from datastates import dtensors, replicas
from datastates.errors import SettingsError
from datastates.meeting import Meeting
from datastates.protocol import HOST, Shard

Place = tuple[str, str]
"""A full key, and which part of that logical tensor, in words: alike on all ranks that hold it."""


@dataclass(frozen=True, slots=True)
class Share:
    """A part that several ranks want.

    Attributes:
        place: Which.
        ranks: Who wants it, ascending.
        reader: Who reads it.
    """

    place: Place
    ranks: tuple[int, ...]
    reader: int


def can_broadcast(shard: Shard) -> bool:
    """Whether torch can send a shard's memory to other ranks; raises SettingsError where it cannot send at all."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        raise SettingsError("replicas: 'broadcast' needs torch.distributed to be initialized; 'read' does without")
    if shard.kind != "torch" or shard.buffer is None or not shard.part.numel:
        return False
    devices = str(distributed.distributed_c10d.get_backend_config())
    return ("cpu:" if shard.buffer.device == HOST else "cuda:") in devices


def agree(meeting: Meeting, error: Exception | None, wanted: Mapping[Place, int]) -> list[Share]:
    """Who reads what: the parts that more than one rank wants, the work spread evenly; the same list on all ranks.

    Args:
        meeting: Of the ranks.
        error: Why this rank cannot restore.
        wanted: The parts that this rank wants and can be sent, each with its bytes.
    """

    def decide(told: dict[int, bytes]) -> bytes:
        ranks: dict[tuple[Place, int], list[int]] = {}
        for rank, data in sorted(told.items()):
            for key, part, nbytes in msgpack.unpackb(data):
                ranks.setdefault(((key, part), nbytes), []).append(rank)
        shared = sorted((tuple(who), place, nbytes) for (place, nbytes), who in ranks.items() if len(who) > 1)
        readers = replicas.owners([(f"{place[0]} {place[1]}", nbytes, who) for who, place, nbytes in shared])
        return msgpack.packb([[place, who, reader] for (who, place, _), reader in zip(shared, readers, strict=True)])

    own = msgpack.packb([[key, part, nbytes] for (key, part), nbytes in wanted.items()])
    answer = msgpack.unpackb(meeting.settle("share", error, own, decide))
    return [Share((key, part), tuple(who), reader) for (key, part), who, reader in answer]


def broadcast(shares: Sequence[Share], shards: Mapping[Place, Shard]) -> None:
    """Send what has been read; all ranks call it with the same shares, each with its own live parts."""
    distributed: Any = sys.modules["torch.distributed"]
    rank, everybody = distributed.get_rank(), tuple(range(distributed.get_world_size()))
    for ranks, members in groupby(shares, key=lambda share: share.ranks):
        # a group is made by all ranks together, also by those that are not in it
        group = None if ranks == everybody else distributed.new_group(list(ranks))
        if rank in ranks:
            for share in members:
                _send(distributed, shards[share.place].source, share.reader, group)
        if group is not None and rank in ranks:
            distributed.destroy_process_group(group)


def _send(distributed: Any, array: Any, reader: int, group: Any) -> None:
    torch: Any = sys.modules["torch"]
    tensor = dtensors.local(array).detach()
    # as bytes: not every backend knows every element type
    flat = tensor.contiguous()
    distributed.broadcast(flat.view(-1).view(torch.uint8), src=reader, group=group)
    if flat.data_ptr() != tensor.data_ptr():
        with torch.no_grad():
            tensor.copy_(flat)
