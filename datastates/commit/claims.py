"""What one rank's container holds of every logical tensor, as columns: what ranks tell each other to commit. Pure."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from datastates._base.columns import U8, U32, U64
from datastates.commit.tiling import PRIME, cover
from datastates.container.index import Index
from datastates.container.table import Row, ShardTable
from datastates.state.parts import Part
from datastates.state.shards import full_key


def key_hash(full: str) -> int:
    """64 bits of an array's full key: what a catalog is sorted by."""
    return _hash64(b"a" + full.encode("utf-8", "surrogatepass"))


def object_hash(full: str) -> int:
    """64 bits of an object's full key; an array of the same key has others."""
    return _hash64(b"o" + full.encode("utf-8", "surrogatepass"))


def _hash64(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def form_hash(row: Row) -> int:
    """32 bits, never 0, of what all parts of a logical tensor have in common: its element type and its shape.

    The lowest bit says whether it has elements.
    """
    text = f"{row.dtype.name} {row.global_shape}".encode()
    found = int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")
    return found & ~1 | 2 | (0 not in row.global_shape)


def span_of(part: Part) -> tuple[int, int]:
    """The first element of a part, and one past its last, in the flattened logical tensor."""
    if part.flat is not None:
        return part.flat
    if part.numel == 0:
        return 0, 0
    assert part.offset is not None
    first = last = 0
    for size, begin, length in zip(part.global_shape, part.offset, part.shape, strict=True):
        first, last = first * size + begin, last * size + begin + length - 1
    return first, last + 1


@dataclass(frozen=True, slots=True, eq=False)
class Claims:
    """One rank's arrays and objects. An empty part says that the tensor is known here, and holds nothing.

    Attributes:
        key: For each array, then for each object, :func:`key_hash` or :func:`object_hash`.
        form: For each, :func:`form_hash`; 0 for an object.
        begin, end: For each, the :func:`span_of` its part; 0 and 1 for an object.
        digest: For each, what its bytes contribute to the logical tensor's digest.
        digested: For each, 1 where that is known.
        cover: The sum of :func:`~datastates.commit.tiling.cover` over all arrays.
    """

    key: U64
    form: U32
    begin: U64
    end: U64
    digest: U32
    digested: U8
    cover: int

    def __len__(self) -> int:
        """How many there are."""
        return len(self.key)


def claims_of(table: ShardTable) -> Claims:
    """The claims of a container's arrays, digests left out: all that depends on the structure alone."""
    rows = list(table.rows(range(len(table))))
    parts = [row.part for row in rows]
    spans = [span_of(part) for part in parts]
    total = 0
    for row, part in zip(rows, parts, strict=True):
        if part.numel:
            total += cover(row.key, row.dtype.name, part)
    return Claims(
        key=np.array([key_hash(row.key) for row in rows], np.uint64),
        form=np.array([form_hash(row) for row in rows], np.uint32),
        begin=np.array([begin for begin, _ in spans], np.uint64),
        end=np.array([end for _, end in spans], np.uint64),
        digest=np.zeros(len(rows), np.uint32),
        digested=np.zeros(len(rows), np.uint8),
        cover=total % PRIME,
    )


def whole_claims(arrays: Claims, index: Index) -> Claims:
    """The claims of a container: its arrays with their digests, and its objects."""
    table, rest = index.shards, len(index.objects)
    hashes = [object_hash(full_key(table.providers[o.provider], o.key)) for o in index.objects]
    return replace(
        arrays,
        key=np.append(arrays.key, np.array(hashes, np.uint64)),
        form=np.append(arrays.form, np.zeros(rest, np.uint32)),
        begin=np.append(arrays.begin, np.zeros(rest, np.uint64)),
        end=np.append(arrays.end, np.ones(rest, np.uint64)),
        digest=np.append(table.digest, np.zeros(rest, np.uint32)),
        digested=np.append(table.digested, np.zeros(rest, np.uint8)),
    )


_COLUMNS = {"key": "<u8", "form": "<u4", "begin": "<u8", "end": "<u8", "digest": "<u4", "digested": "|u1"}


def encode_claims(claims: Claims) -> dict[str, bytes]:
    """The claims for msgpack."""
    columns = {c: getattr(claims, c).astype(width).tobytes() for c, width in _COLUMNS.items()}
    return {**columns, "cover": claims.cover.to_bytes(16, "little")}


def decode_claims(fields: dict[str, bytes]) -> Claims:
    """The mirror of :func:`encode_claims`."""
    columns: dict[str, Any] = {c: np.frombuffer(fields[c], width) for c, width in _COLUMNS.items()}
    return Claims(**columns, cover=int.from_bytes(fields["cover"], "little"))
