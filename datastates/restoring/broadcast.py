"""Parts that several ranks restore alike: one of them reads, and torch broadcasts to the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import msgpack

from datastates._base.loaded import loaded
from datastates.errors import RestoreError, SettingsError
from datastates.planning import owners
from datastates.restoring.meeting import Meeting
from datastates.state import dtensors
from datastates.state.shards import HOST, Shard

PartKey = tuple[str, str]
"""A full key, and which part of that logical tensor, in words: alike on all ranks that hold it."""


@dataclass(frozen=True, slots=True)
class SharedPart:
    """A part that several ranks want. The ranks are those of torch.distributed, which may number them otherwise.

    Attributes:
        place: Which.
        ranks: Who wants it, ascending.
        reader: Who reads it.
    """

    place: PartKey
    ranks: tuple[int, ...]
    reader: int


def can_broadcast(shard: Shard) -> bool:
    """Whether torch can send a shard's memory to other ranks."""
    if shard.kind != "torch" or shard.buffer is None or not shard.part.numel:
        return False
    devices = str(_distributed().distributed_c10d.get_backend_config())
    return ("cpu:" if shard.buffer.device == HOST else "cuda:") in devices


def agree(meeting: Meeting, wanted: Callable[[], Mapping[PartKey, int]]) -> list[SharedPart]:
    """Who reads what: the parts that more than one rank wants, the work spread evenly; the same list on all ranks.

    Args:
        meeting: Of the ranks.
        wanted: Gives the parts that this rank wants and can be sent, each with its bytes; what it raises is raised,
            once the others know of it.

    Raises:
        SettingsError: torch.distributed is not initialized here.
        RestoreError: That is so on another rank, or it has other ranks than those that restore; the same on all ranks.
    """

    def decide(told: dict[int, bytes]) -> bytes:
        said = {rank: msgpack.unpackb(data) for rank, data in sorted(told.items())}
        everybody = list(range(len(said)))
        if sorted(torch_rank for torch_rank, _, _ in said.values()) != everybody or any(
            size != len(said) for _, size, _ in said.values()
        ):
            shown = ", ".join(f"rank {rank} is {number} of {size}" for rank, (number, size, _) in said.items())
            raise RestoreError(
                "replicas: 'broadcast' needs the ranks that restore to be all those of torch.distributed, each once; "
                f"there {shown}; 'read' does without"
            )
        ranks: dict[tuple[PartKey, int], list[int]] = {}
        for torch_rank, _, places in sorted(said.values()):
            for key, part, nbytes in places:
                ranks.setdefault(((key, part), nbytes), []).append(torch_rank)
        shared = sorted((tuple(who), place, nbytes) for (place, nbytes), who in ranks.items() if len(who) > 1)
        readers = owners.owners([(f"{place[0]} {place[1]}", nbytes, who) for who, place, nbytes in shared])
        return msgpack.packb([[place, who, reader] for (who, place, _), reader in zip(shared, readers, strict=True)])

    def own() -> bytes:
        distributed = _distributed()
        places = [[key, part, nbytes] for (key, part), nbytes in wanted().items()]
        return msgpack.packb([distributed.get_rank(), distributed.get_world_size(), places])

    answer = msgpack.unpackb(meeting.settle("share", own, decide))
    return [SharedPart((key, part), tuple(who), reader) for (key, part), who, reader in answer]


def received(shares: Sequence[SharedPart]) -> set[str]:
    """Full keys of what this rank does not read by itself: it is sent them."""
    rank = _distributed().get_rank() if shares else None
    return {share.place[0] for share in shares if rank in share.ranks and rank != share.reader}


def broadcast(shares: Sequence[SharedPart], shards: Mapping[PartKey, Shard]) -> None:
    """Send what has been read; all ranks call it with the same shares, each with its own live parts."""
    distributed = _distributed()
    rank, everybody = distributed.get_rank(), tuple(range(distributed.get_world_size()))
    for ranks, members in groupby(shares, key=lambda share: share.ranks):
        # a group is made by all ranks together, also by those that are not in it
        group = None if ranks == everybody else distributed.new_group(list(ranks))
        if rank in ranks:
            for share in members:
                _send(distributed, shards[share.place].source, share.reader, group)
        if group is not None and rank in ranks:
            distributed.destroy_process_group(group)


def _distributed() -> Any:
    """torch.distributed; raises SettingsError where it cannot send."""
    distributed: Any = loaded("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        raise SettingsError("replicas: 'broadcast' needs torch.distributed to be initialized; 'read' does without")
    return distributed


def _send(distributed: Any, array: Any, reader: int, group: Any) -> None:
    torch: Any = loaded("torch")
    tensor = dtensors.local(array).detach()
    # as bytes: not every backend knows every element type
    flat = tensor.contiguous()
    distributed.broadcast(flat.view(-1).view(torch.uint8), src=reader, group=group)
    if flat.data_ptr() != tensor.data_ptr():
        with torch.no_grad():
            tensor.copy_(flat)
