"""The items that a load wants of files of torch.distributed.checkpoint, and the memory that each is read into."""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from datastates.container.table import Row
from datastates.reading.read_queue import Source
from datastates.reading.reads import Reads
from datastates.state import arrays
from datastates.state.strides import span


@dataclass(slots=True, eq=False)  # not frozen: a load makes one for each item
class Wanted:
    """An item: a box of a stored tensor, or bytes, and its place in a file by the checkpoint's metadata.

    Attributes:
        name: Its stored part, for messages.
        key: The name of its stored part within a file of torch's own writer.
        place: Offset and length of its stored part in the file.
        is_bytes: Whether it is bytes, not a tensor.
        is_transformed: Whether extensions of torch have transformed the bytes.
        begin: First index of the stored part in its logical tensor.
        within: First index of the box in the stored part.
        lengths: The shape of the box.
        is_stored_as: Whether a container's key names the stored part.
        target: Gives the torch tensor that the box is read into; raises ValueError if it has another shape.
        filled: Called once the box has been read into that tensor.
        take: Takes the bytes, or the pickled tensor that has the box; raises FormatError if it cannot be read.
    """

    name: str
    key: str
    place: tuple[int, int]
    is_bytes: bool
    is_transformed: bool
    begin: tuple[int, ...]
    within: tuple[int, ...]
    lengths: tuple[int, ...]
    is_stored_as: Callable[[str], bool]
    target: Callable[[], Any]
    filled: Callable[[Any], None]
    take: Callable[[io.BytesIO], None]


def is_memory(target: Any, dtype: Any) -> bool:
    """Whether elements of type ``dtype`` can be read straight into a tensor's memory."""
    return target.dtype == dtype and arrays.kind_of(target) is not None


class ClaimedMemory:
    """Memory that a load reads into. Tensors that share memory must not be read there at the same time."""

    def __init__(self) -> None:
        """Begin with no memory claimed."""
        self._ranges: dict[Any, tuple[list[int], list[int]]] = {}

    def claim(self, target: Any) -> bool:
        """Claim a tensor's memory, from its first element to its last; False, and no claim, if some of it is taken."""
        begin = target.data_ptr()
        end = begin + span(tuple(target.shape), target.stride()) * target.element_size()
        begins, ends = self._ranges.setdefault(target.device, ([], []))
        at = bisect_right(begins, begin)
        if (at and ends[at - 1] > begin) or (at < len(begins) and begins[at] < end):
            return False
        if begin < end:
            begins.insert(at, begin)
            ends.insert(at, end)
        return True


def queue_box(
    reads: Reads, source: Source, row: Row, wanted: Wanted, claims: ClaimedMemory | None = None
) -> Callable[[], None]:
    """Plan to read an item from a stored row, which is a box of its logical tensor.

    Args:
        reads: The reads of this load, to add to.
        source: The file that has the row.
        row: The stored row.
        wanted: The item.
        claims: The memory that this load reads into. A tensor whose memory is taken is filled from a copy. None: no
            tensors of this load can share memory.

    Returns:
        A function to call once the item has been read.

    Raises:
        ValueError: The tensor has another shape than the item.
    """
    import torch

    assert row.box is not None
    target = wanted.target()
    dtype = getattr(torch, row.dtype.name)
    in_place = is_memory(target, dtype) and (claims is None or claims.claim(target))
    landing = target if in_place else torch.empty(wanted.lengths, dtype=dtype, device="cpu")
    live = arrays.destination(row.key, landing)
    offset = tuple(first + begin for first, begin in zip(row.box, wanted.within, strict=True))
    reads.add(source, row, replace(live, global_shape=row.global_shape, offset=offset))

    def end() -> None:
        if landing is not target:
            target.copy_(landing)
        wanted.filled(target)

    return end
