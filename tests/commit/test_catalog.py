"""The catalog tells which ranks hold which stretch of a tensor; a look-up reads few of its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datastates.commit.catalog import Catalog, ConflictError, encode_catalog
from datastates.commit.claims import Claims, decode_claims, encode_claims, key_hash
from datastates.errors import FormatError


def _claims(rows: Sequence[tuple[int, int, int]], digest: Sequence[int] | None = None, form: int = 7) -> Claims:
    """One rank's claims, from (key, begin, end). An even ``form`` marks tensors without elements."""
    n = len(rows)
    return Claims(
        key=np.array([k for k, _, _ in rows], np.uint64),
        form=np.full(n, form, np.uint32),
        begin=np.array([b for _, b, _ in rows], np.uint64),
        end=np.array([e for _, _, e in rows], np.uint64),
        digest=np.array(digest if digest is not None else [0] * n, np.uint32),
        digested=np.full(n, digest is not None, np.uint8),
        cover=5,
    )


def _open(claims: Sequence[Claims]) -> Catalog:
    nbytes, crcs = np.arange(len(claims), dtype=np.uint64) + 100, np.arange(len(claims), dtype=np.uint32)
    data, crc = encode_catalog(claims, nbytes, crcs)
    return Catalog(lambda offset, length: data[offset : offset + length], len(data), crc)


_PARTS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 40), st.integers(0, 15)).map(lambda t: (t[0], t[1], t[1] + t[2])),
    max_size=12,
)


@settings(max_examples=150)
@given(st.lists(_PARTS, min_size=1, max_size=6), st.integers(0, 50), st.integers(1, 12))
def test_every_holder_is_found(ranks: list[list[tuple[int, int, int]]], begin: int, length: int) -> None:
    seen: set[int] = set()
    for rows in ranks:  # only one part may hold a tensor's first element
        rows[:] = [(k, b, e) for k, b, e in rows if b or e == b or not (k in seen or seen.add(k))]
    catalog = _open([_claims(rows, form=6) for rows in ranks])
    for key in range(6):
        known = [r for r, rows in enumerate(ranks) for k, _, _ in rows if k == key]
        tensor = catalog.find(key)
        assert (tensor is None) == (not known)
        if tensor is None:
            continue
        wanted = {
            r for r, rows in enumerate(ranks) for k, b, e in rows if k == key and max(b, begin) < min(e, begin + length)
        }
        found = catalog.holders(tensor, begin, begin + length)
        assert wanted <= set(found)
        assert found == sorted(set(found))
        assert catalog.any_holder(tensor) in known


def test_disjoint_parts_have_exactly_their_holders() -> None:
    catalog = _open([_claims([(3, 10 * r, 10 * r + 10)]) for r in range(100)])
    tensor = catalog.find(3)
    assert tensor is not None
    assert catalog.holders(tensor, 95, 121) == [9, 10, 11, 12]
    assert catalog.holders(tensor, 90, 100) == [9]
    assert catalog.container(7) == (107, 7)


def test_digests_of_the_parts_are_combined() -> None:
    catalog = _open([_claims([(1, 0, 4), (2, 0, 1)], [0b1100, 9]), _claims([(1, 4, 8), (2, 0, 0)], [0b1010, 77])])
    tensors = [catalog.find(1), catalog.find(2)]
    # the digest of an empty part does not count
    assert [catalog.digest(t) for t in tensors if t is not None] == [0b0110, 9]
    unknown = _open([_claims([(1, 0, 4)], [5]), _claims([(1, 4, 8)])])
    assert unknown.digest(0) is None


def test_a_tensor_without_elements_is_found() -> None:
    catalog = _open([_claims([], form=6), _claims([(4, 0, 0)], form=6), _claims([(4, 0, 0)], form=6)])
    tensor = catalog.find(4)
    assert tensor is not None
    assert catalog.any_holder(tensor) == 1
    assert catalog.holders(tensor, 0, 0) == []


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([(1, 0, 4)], [(1, 0, 4)]),
        ([(1, 0, 1)], [(1, 0, 0), (1, 0, 1)]),
        ([(0, 0, 9), (1, 0, 8)], [(0, 9, 12), (1, 0, 4)]),
    ],
)
def test_two_ranks_with_the_first_element_conflict(
    first: list[tuple[int, int, int]], second: list[tuple[int, int, int]]
) -> None:
    with pytest.raises(ConflictError, match="ranks 0 and 1"):
        _open([_claims(first), _claims(second)])


def test_different_descriptions_conflict() -> None:
    with pytest.raises(ConflictError) as caught:
        _open([_claims([(8, 0, 4)]), _claims([(8, 4, 8)]), _claims([(8, 8, 9)], form=9)])
    assert (caught.value.key, caught.value.ranks) == (8, (0, 2))


def test_a_tensor_that_each_rank_leaves_to_another_is_a_conflict() -> None:
    with pytest.raises(ConflictError) as caught:
        _open([_claims([(4, 0, 9), (8, 0, 0)]), _claims([(8, 0, 0)])])
    assert (caught.value.key, str(caught.value)) == (8, "ranks 0 and 1 leave it to others")


def _reads(claims: Sequence[Claims]) -> tuple[Catalog, list[int]]:
    """A catalog, and a list of the lengths that it reads from now on."""
    data, crc = encode_catalog(claims, np.zeros(len(claims), np.uint64), np.zeros(len(claims), np.uint32))
    reads: list[int] = []

    def read(offset: int, length: int) -> bytes:
        reads.append(length)
        return bytes(data[offset : offset + length])

    catalog = Catalog(read, len(data), crc)
    assert len(data) > 1 << 20
    reads.clear()
    return catalog, reads


def test_a_lookup_touches_few_blocks_of_many() -> None:
    ranks, tensors, size = 1024, 100, 3
    catalog, reads = _reads(
        [_claims([(k * 2**57, r * size, r * size + size) for k in range(tensors)]) for r in range(ranks)]
    )
    for k in range(0, tensors, 7):
        tensor = catalog.find(k * 2**57)
        assert tensor is not None
        assert catalog.holders(tensor, 205 * size, 207 * size) == [205, 206]
    # each look-up reads the tensor's entry, its last row, and the wanted rows
    assert sum(reads) <= len(range(0, tensors, 7)) * (4 << 12)


def test_tensors_of_one_rank_each_are_found_by_few_blocks() -> None:
    keys = np.random.default_rng(1).integers(0, 2**64, 60_000, dtype=np.uint64)
    catalog, reads = _reads([_claims([(k, 0, 4) for k in part.tolist()]) for part in np.split(keys, 60)])
    for key in keys[:50].tolist():
        tensor = catalog.find(key)
        assert tensor is not None
        assert catalog.holders(tensor, 0, 4) == [0]
    assert sum(reads) <= 50 * (6 << 12)


def test_skewed_parts_are_found_by_halving() -> None:
    bounds = [0, *(2**i for i in range(60))]
    catalog = _open([_claims([(3, a, b)]) for a, b in pairwise(bounds)])
    for rank in range(60):
        assert catalog.holders(0, bounds[rank], bounds[rank + 1]) == [rank]


def test_every_flipped_byte_is_found() -> None:
    data, crc = encode_catalog(
        [_claims([(1, 0, 4)]), _claims([(1, 4, 8)])], np.ones(2, np.uint64), np.ones(2, np.uint32)
    )

    def walk(changed: bytes) -> None:
        catalog = Catalog(lambda o, n: changed[o : o + n], len(changed), crc)
        tensor = catalog.find(1)
        assert tensor is not None
        catalog.holders(tensor, 0, 8), catalog.digest(tensor), catalog.container(1)

    walk(data)
    for i in range(len(data)):
        with pytest.raises(FormatError):
            walk(data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :])
    for length in range(len(data)):
        with pytest.raises(FormatError):
            walk(data[:length])


def test_claims_come_back_as_they_were() -> None:
    claims = _claims([(key_hash("model/w"), 3, 9)], [12])
    again = decode_claims(encode_claims(claims))
    assert again.cover == claims.cover
    for column in ("key", "form", "begin", "end", "digest", "digested"):
        np.testing.assert_array_equal(getattr(again, column), getattr(claims, column))
