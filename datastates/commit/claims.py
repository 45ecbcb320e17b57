"""Claims: columns that tell which part of each logical tensor one rank's container holds. No I/O.

Each rank sends its claims with its vote; the coordinator builds the catalog from them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from datastates._base.columns import U8, U32, U64
from datastates.container.index import Index
from datastates.container.table import Row, ShardTable
from datastates.errors import rank_names
from datastates.state.parts import Part
from datastates.state.shards import full_key

PRIME = 2**127 - 1
"""The modulus of sums of covers."""


def _random(*what: object) -> int:
    """A number below 2**128 that looks random, and is the same in every process."""
    return int.from_bytes(hashlib.blake2b(ascii(what).encode(), digest_size=16).digest(), "little")


def cover(key: str, dtype: str, part: Part) -> int:
    """A number modulo :data:`PRIME`. The covers of parts that tile their tensors add up to 0.

    Suppose that at most one part of each logical tensor has its first element. If every logical tensor is tiled exactly
    once, by boxes only or by flat ranges only, the covers of all parts add up to 0 modulo :data:`PRIME`. Otherwise they
    add up to 0 with a probability below 2**-100. With several first elements this does not hold: a tensor that is tiled
    twice adds up to 0, too. So does a tensor without any element in its parts.

    Args:
        key: The logical tensor's key.
        dtype: Its element type. Parts of another type are parts of another tensor.
        part: The part that is held.
    """
    if part.is_whole:
        return 0
    return (_measure(key, dtype, part) - (_whole(key, dtype, part) if part.has_first else 0)) % PRIME


def _measure(key: str, dtype: str, part: Part) -> int:
    """An additive measure: the union of disjoint parts of one kind has the sum of their measures."""
    tensor = (key, dtype, part.global_shape)
    if part.flat is not None:
        return _random(*tensor, "flat", part.flat[1]) - _random(*tensor, "flat", part.flat[0])
    result = 1
    for d, (begin, n) in enumerate(zip(part.offset or (), part.shape, strict=True)):
        side = _random(*tensor, "box", d, begin + n) - _random(*tensor, "box", d, begin)
        result = result * side % PRIME
    return result


def _whole(key: str, dtype: str, part: Part) -> int:
    """The measure of the whole logical tensor, as a part of the same kind."""
    shape = part.global_shape
    if part.flat is None:
        return _measure(key, dtype, Part.whole(shape))
    n = math.prod(shape)
    return _measure(key, dtype, Part(shape, (n,), None, (0, n)))


def key_hash(full: str) -> int:
    """A 64-bit hash of an array's full key. A catalog is sorted by it."""
    return _hash64(b"a" + full.encode("utf-8", "surrogatepass"))


def object_hash(full: str) -> int:
    """A 64-bit hash of an object's full key. It differs from :func:`key_hash` of the same key."""
    return _hash64(b"o" + full.encode("utf-8", "surrogatepass"))


def _hash64(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def form_hash(row: Row) -> int:
    """A 32-bit hash, never 0, of a logical tensor's element type and shape, which all its parts share.

    The lowest bit is 1 if the tensor has elements.
    """
    text = f"{row.dtype.name} {row.global_shape}".encode()
    found = int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")
    return found & ~1 | 2 | (0 not in row.global_shape)


@dataclass(frozen=True, slots=True, eq=False)
class Claims:
    """One rank's arrays and objects. With an empty part, the rank knows the tensor but holds none of its elements.

    Attributes:
        key: :func:`key_hash` of each array, then :func:`object_hash` of each object. The other columns have this order.
        form: :func:`form_hash` of each array; 0 for an object.
        begin, end: ``Part.bounds`` of each array; 0 and 1 for an object.
        digest: The contribution of each array to its logical tensor's digest; 0 for an object.
        digested: 1 where ``digest`` is known, else 0; 0 for an object.
        cover: The sum of :func:`~datastates.commit.claims.cover` over all arrays.
    """

    key: U64
    form: U32
    begin: U64
    end: U64
    digest: U32
    digested: U8
    cover: int

    def __len__(self) -> int:
        """The number of arrays and objects."""
        return len(self.key)


def claims_of(table: ShardTable) -> Claims:
    """The claims of a container's arrays, without digests. They depend on the structure of the state only."""
    rows = list(table.rows(range(len(table))))
    parts = [row.part for row in rows]
    spans = [part.bounds for part in parts]
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
    """The claims of a whole container: ``arrays`` with their digests, and the objects of its index."""
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
NO_CLAIMS = Claims(**{name: np.zeros(0, kind) for name, kind in _COLUMNS.items()}, cover=0)
"""The claims of a container that is not there."""


def is_complete(claims: Iterable[Claims | None]) -> bool:
    """Whether the parts of containers make whole tensors; None claims nothing."""
    return sum(one.cover for one in claims if one is not None) % PRIME == 0


def joined(one: Claims, other: Claims) -> Claims:
    """The claims of two containers, end to end."""
    columns: dict[str, Any] = {c: np.append(getattr(one, c), getattr(other, c)) for c in _COLUMNS}
    return Claims(**columns, cover=(one.cover + other.cover) % PRIME)


def encode_claims(claims: Claims) -> dict[str, bytes]:
    """The claims as fields for msgpack."""
    columns = {c: getattr(claims, c).astype(width).tobytes() for c, width in _COLUMNS.items()}
    return {**columns, "cover": claims.cover.to_bytes(16, "little")}


def decode_claims(fields: dict[str, bytes]) -> Claims:
    """The inverse of :func:`encode_claims`."""
    columns: dict[str, Any] = {c: np.frombuffer(fields[c], width) for c, width in _COLUMNS.items()}
    return Claims(**columns, cover=int.from_bytes(fields["cover"], "little"))


_SHOWN = 3
_HINT = (
    "; state that ranks hold alike belongs into a ReplicatedProvider, "
    "what differs by rank needs a key of its own or a provider whose class has per_rank = True"
)


def describe_conflicts(tables: Iterable[tuple[int, ShardTable]]) -> str | None:
    """Describe the tensors that are held twice or only partly, or whose types or shapes differ; None if all is well.

    Args:
        tables: The shard table of each container, with the rank that wrote it, in the order of the ranks.
    """
    held: dict[str, list[tuple[int, Row]]] = {}
    for rank, table in tables:
        for row in table.rows(range(len(table))):
            held.setdefault(row.key, []).append((rank, row))
    found = [text for key in sorted(held) for text in _of_tensor(key, held[key])]
    if not found:
        return None
    more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    hint = _HINT if any("both hold" in text or "another's copy" in text for text in found) else ""
    return "; ".join(found[:_SHOWN]) + more + hint


def _of_tensor(key: str, rows: list[tuple[int, Row]]) -> Iterator[str]:
    (rank, first), *others = rows
    for other, row in others:
        if (row.dtype, row.global_shape) != (first.dtype, first.global_shape):
            texts = [f"{r.dtype.name} of shape {r.global_shape} on rank {n}" for n, r in ((rank, first), (other, row))]
            yield f"{key!r} is {' but '.join(texts)}"
            return
    parts = [(r, row.part) for r, row in rows if row.part.numel]
    tiled = sum(cover(key, first.dtype.name, part) for _, part in parts) % PRIME == 0
    # the covers of a tensor that is held twice add up to 0, too: so count its first element
    if tiled and sum(part.has_first for _, part in parts) == 1:
        return
    numel = int(np.prod(first.global_shape, dtype=np.int64))
    runs = sorted(
        (begin, begin + length, r)
        for r, part in parts
        for begin, length in zip(*(column.tolist() for column in part.runs()), strict=True)
    )
    position, last = 0, -1
    for begin, end, r in runs:
        if begin > position:
            break
        if begin < position:
            yield f"{key!r}: ranks {last} and {r} both hold elements {begin} to {min(end, position)}"
            return
        position, last = end, r
    if position < numel:
        until = next((begin for begin, _, _ in runs if begin > position), numel)
        left = [rank for rank, row in rows if not row.part.numel]
        why = f": {rank_names(left)} left them to another's copy, which is not there" if left else ""
        yield f"{key!r}: nobody holds elements {position} to {until} of {numel}{why}"
    elif parts:
        yield f"{key!r}: some ranks hold boxes of it and others flat ranges"
