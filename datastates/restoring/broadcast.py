"""Restores parts that several ranks hold alike: one rank reads a part, and torch broadcasts it to the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from datastates._base.loaded import loaded
from datastates._base.packing import pack, unpack
from datastates.errors import RestoreError, SettingsError
from datastates.planning import owners
from datastates.restoring.meeting import Meeting
from datastates.state import dtensors
from datastates.state.shards import HOST, Shard, full_key

PartKey = tuple[str, str]
"""A full key, and the text of a part of that logical tensor: equal on all ranks that hold the part."""


def part_key(provider: str, shard: Shard) -> PartKey:
    """The key of a part that a provider of that name restores."""
    return full_key(provider, shard.key), f"{shard.part} {shard.dtype}"


@dataclass(frozen=True, slots=True)
class SharedPart:
    """A part that several ranks want. Ranks have the numbers of torch.distributed, which may differ from ours.

    Attributes:
        place: The part.
        ranks: The ranks that want it, ascending.
        reader: The rank that reads it.
    """

    place: PartKey
    ranks: tuple[int, ...]
    reader: int


def can_broadcast(shard: Shard) -> bool:
    """Whether torch can send a shard's memory to other ranks. Raises SettingsError as :func:`agree` does."""
    if shard.kind != "torch" or shard.buffer is None or not shard.part.numel:
        return False
    devices = str(_distributed().distributed_c10d.get_backend_config())
    return ("cpu:" if shard.buffer.device == HOST else "cuda:") in devices


def agree(meeting: Meeting, wanted: Callable[[], Mapping[PartKey, int]]) -> list[SharedPart]:
    """Agree on who reads each part that several ranks want. The bytes are spread evenly over the ranks.

    Args:
        meeting: The meeting of the ranks.
        wanted: Returns the parts that this rank wants and can be sent, each with its size in bytes. Its error is raised
            here once the other ranks know of it.

    Returns:
        The shared parts: the same list on all ranks.

    Raises:
        SettingsError: torch.distributed is not initialized on this rank.
        RestoreError: Another rank has failed, or the ranks that restore are not those of torch.distributed. The same
            error on all ranks.
    """

    def decide(told: dict[int, bytes]) -> bytes:
        said = {rank: unpack(data) for rank, data in sorted(told.items())}
        everybody = [(number, len(said)) for number in range(len(said))]
        if sorted((number, size) for number, size, _ in said.values()) != everybody:
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
        return pack([[place, who, reader] for (who, place, _), reader in zip(shared, readers, strict=True)])

    def own() -> bytes:
        distributed = _distributed()
        places = [[key, part, nbytes] for (key, part), nbytes in wanted().items()]
        return pack([distributed.get_rank(), distributed.get_world_size(), places])

    answer = unpack(meeting.settle("share", own, decide))
    return [SharedPart((key, part), tuple(who), reader) for (key, part), who, reader in answer]


def received(shares: Sequence[SharedPart]) -> set[PartKey]:
    """The parts that this rank receives instead of reading them."""
    rank = _distributed().get_rank() if shares else None
    return {share.place for share in shares if rank in share.ranks and rank != share.reader}


def broadcast(shares: Sequence[SharedPart], shards: Mapping[PartKey, Shard]) -> None:
    """Send the parts that have been read to the ranks that want them.

    Args:
        shares: The result of :func:`agree`. All ranks call this function with the same list.
        shards: The live parts of this rank.
    """
    distributed = _distributed()
    rank, everybody = distributed.get_rank(), tuple(range(distributed.get_world_size()))
    for ranks, members in groupby(shares, key=lambda share: share.ranks):
        # all ranks must take part in making a group, even those that are not in it
        group = None if ranks == everybody else distributed.new_group(list(ranks))
        if rank in ranks:
            for share in members:
                _send(distributed, shards[share.place].source, share.reader, group)
        if group is not None and rank in ranks:
            distributed.destroy_process_group(group)


def _distributed() -> Any:
    """torch.distributed; raises SettingsError if it is not initialized."""
    distributed: Any = loaded("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        raise SettingsError("replicas: 'broadcast' needs torch.distributed to be initialized; 'read' does without")
    return distributed


def _send(distributed: Any, array: Any, reader: int, group: Any) -> None:
    torch: Any = loaded("torch")
    tensor = dtensors.local(array).detach()
    # as bytes, because not every backend supports every element type
    flat = tensor.contiguous()
    distributed.broadcast(flat.view(-1).view(torch.uint8), src=reader, group=group)
    if flat.data_ptr() != tensor.data_ptr():
        with torch.no_grad():
            tensor.copy_(flat)
