"""What parts share, and whether they tile a tensor, checked by counting element by element."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datastates.commit.claims import PRIME, cover
from datastates.state import parts, strides
from datastates.state.parts import Part


def shape_of(random: random.Random) -> tuple[int, ...]:
    """A shape of up to four dimensions, few of them of length 0."""
    return tuple(random.choice((0, *range(1, 7), *range(1, 7))) for _ in range(random.randint(0, 4)))


def part_of(random: random.Random, shape: tuple[int, ...]) -> Part:
    def cut(n: int) -> tuple[int, int]:
        a, b = sorted((random.randint(0, n), random.randint(0, n)))
        return random.choice(((a, b), (a, b), (0, b), (a, n), (0, n)))

    if random.random() < 0.5:
        a, b = cut(math.prod(shape))
        return Part(shape, (b - a,), None, (a, b))
    sides = [cut(n) for n in shape]
    return Part(shape, tuple(b - a for a, b in sides), tuple(a for a, _ in sides))


def parts_of(count: int, seed: int) -> list[Part]:
    chance = random.Random(seed)
    shape = shape_of(chance)
    return [part_of(chance, shape) for _ in range(count)]


CASES = range(2000)


def elements(part: Part) -> np.ndarray:
    """Each element's number in the flattened logical tensor, in the part's own order and shape."""
    everything = np.arange(math.prod(part.global_shape)).reshape(part.global_shape)
    if part.flat is not None:
        return everything.ravel()[slice(*part.flat)]
    assert part.offset is not None
    return everything[tuple(slice(o, o + n) for o, n in zip(part.offset, part.shape, strict=True))]


def test_runs_are_the_maximal_stretches() -> None:
    for seed in CASES:
        check_runs_are_the_maximal_stretches(parts_of(1, seed))


def check_runs_are_the_maximal_stretches(made: list[Part]) -> None:
    begin, length = made[0].runs()
    found = [e for b, n in zip(begin.tolist(), length.tolist(), strict=True) for e in range(b, b + n)]
    assert found == elements(made[0]).ravel().tolist()
    assert (length > 0).all()
    assert (begin[1:] > (begin + length)[:-1]).all()
    assert made[0].numel == len(found)
    assert made[0].is_whole == (len(found) == math.prod(made[0].global_shape))
    assert made[0].has_first == (0 in found)


def test_what_two_parts_share() -> None:
    for seed in CASES:
        check_what_two_parts_share(parts_of(2, seed))


def check_what_two_parts_share(made: list[Part]) -> None:
    source, dest = made
    target = np.full(dest.numel, -1)
    _, runs = parts.intersect(source, dest).stretches()
    source_at, dest_at, length = runs.source, runs.dest, runs.length
    assert (length > 0).all()
    assert (np.diff(dest_at) > 0).all()
    assert (np.diff(source_at) > 0).all()
    for s, d, n in zip(source_at.tolist(), dest_at.tolist(), length.tolist(), strict=True):
        assert (target[d : d + n] == -1).all()
        target[d : d + n] = elements(source).ravel()[s : s + n]
    wanted = elements(dest).ravel()
    shared = np.isin(wanted, elements(source))
    assert (target == np.where(shared, wanted, -1)).all()
    one = parts.stretch(source, dest)
    if one is not None:
        assert list(zip(source_at, dest_at, length, strict=True)) == ([one] if shared.any() else [])
        assert shared.any() or one == (0, 0, 0)
    elif (source.flat is None) == (dest.flat is None):
        assert len(length) > 1

    copied = np.full(elements(dest).shape, -1)
    pieces = list(parts.blocks(source, dest))
    for block in pieces:
        view(copied, dest, block.dest, block)[...] = view(elements(source).copy(), source, block.source, block)
    assert (copied.ravel() == target).all()
    assert sum(math.prod(block.size) for block in pieces) == shared.sum()
    both = (source.flat is None) == (dest.flat is None)
    assert len(pieces) <= (1 if both else max(1, 2 * len(source.global_shape) - 1))


def view(array: np.ndarray, part: Part, begin: tuple[int, ...], block: parts.Block) -> np.ndarray:
    if part.flat is None:
        return array[(*(slice(b, b + n) for b, n in zip(begin, block.size, strict=True)), ...)]
    steps = [step * array.itemsize for step in block.steps]
    return np.lib.stride_tricks.as_strided(array[begin[0] :], block.size, steps)


def test_uncovered_is_what_nobody_has() -> None:
    for seed in CASES:
        check_uncovered_is_what_nobody_has(parts_of(4, seed))


def check_uncovered_is_what_nobody_has(made: list[Part]) -> None:
    dest, *sources = made
    missing = set(elements(dest).ravel().tolist()).difference(*(elements(s).ravel().tolist() for s in sources))
    assert parts.uncovered(dest, sources) == len(missing)
    assert parts.uncovered(dest, []) == dest.numel
    assert parts.uncovered(dest, [dest]) == 0


def test_parts_of_different_tensors_share_nothing_that_could_be_told() -> None:
    for check in (
        parts.intersect,
        parts.stretch,
        lambda a, b: list(parts.blocks(a, b)),
        lambda a, b: parts.uncovered(a, [b]),
    ):
        with pytest.raises(ValueError, match="different shapes"):
            check(Part.whole((2, 3)), Part.whole((3, 2)))


def test_row_major() -> None:
    assert strides.is_row_major((2, 3), (3, 1))
    assert strides.is_row_major((), ())
    assert strides.is_row_major((2, 1, 3), (3, 77, 1))
    assert strides.is_row_major((0, 3), (1, 1))
    assert not strides.is_row_major((2, 3), (1, 2))
    assert not strides.is_row_major((2, 3), (4, 1))


# --- covers
# -----------------------------------------------------------------------------------------

Held = tuple[str, str, Part]


def holds(held: list[Held]) -> bool:
    """Whether the parts of all ranks pass: no first element is held twice, and the covers add up to 0."""
    first = [key for key, _, part in held if part.has_first]
    return len(set(first)) == len(first) and sum(cover(*h) for h in held) % PRIME == 0


def tiling(random: random.Random, shape: tuple[int, ...]) -> list[Part]:
    """A tensor cut at random: into flat ranges, or into boxes by repeated splits, which need not form a grid."""
    if random.random() < 0.5:
        n = math.prod(shape)
        cuts = [0, *sorted(random.randint(0, n) for _ in range(random.randint(0, 5))), n]
        return [Part(shape, (b - a,), None, (a, b)) for a, b in itertools.pairwise(cuts)]
    made = [Part.whole(shape)]
    for _ in range(random.randint(0, 6)):
        i = random.randrange(len(made))
        part = made[i]
        sides = [d for d, n in enumerate(part.shape) if n > 1]
        if not sides:
            continue
        d = random.choice(sides)
        at = random.randint(1, part.shape[d] - 1)
        assert part.offset is not None
        low = Part(shape, (*part.shape[:d], at, *part.shape[d + 1 :]), part.offset)
        offset = (*part.offset[:d], part.offset[d] + at, *part.offset[d + 1 :])
        made[i : i + 1] = [low, Part(shape, (*part.shape[:d], part.shape[d] - at, *part.shape[d + 1 :]), offset)]
    return made


def state(random: random.Random) -> list[Held]:
    held = [
        (key, "float32", part)
        for key in ("a", "b/~1", "c")[: random.randint(1, 3)]
        for part in tiling(random, shape_of(random))
    ]
    random.shuffle(held)
    return held


def test_exact_tilings_add_up_to_nothing() -> None:
    for seed in CASES:
        chance = random.Random(seed)
        held = state(chance)
        assert holds(held)
        key, dtype, part = chance.choice(held)
        # empty parts, of a rank that leaves its replica to another or gets nothing of an uneven split
        if part.shape:
            nothing = Part(part.global_shape, (0, *part.shape[1:]), part.offset, part.flat and (part.flat[0],) * 2)
            assert holds([*held, *[(key, dtype, nothing)] * 2])


def moved(part: Part) -> Part | None:
    """The part moved by one: it overlaps as much as it leaves out. None where it cannot be moved."""
    if part.flat is not None:
        a, b = part.flat
        n = math.prod(part.global_shape)
        shift = 1 if b < n else -1
        return Part(part.global_shape, part.shape, None, (a + shift, b + shift)) if b - a < n else None
    for d, n in enumerate(part.shape):
        assert part.offset is not None
        if n < part.global_shape[d]:
            shift = 1 if part.offset[d] + n < part.global_shape[d] else -1
            offset = (*part.offset[:d], part.offset[d] + shift, *part.offset[d + 1 :])
            return Part(part.global_shape, part.shape, offset)
    return None


SPOILS: dict[str, Callable[[Held], list[Held]]] = {
    "a gap": lambda h: [],
    "twice": lambda h: [h, h],
    "three times": lambda h: [h, h, h],
    "another dtype": lambda h: [(h[0], "float16", h[2])],
    "also as another dtype": lambda h: [h, (h[0], "float16", h[2])],
    "another shape": lambda h: [(h[0], h[1], Part((*h[2].global_shape, 1), h[2].shape, h[2].offset, h[2].flat))],
    "another key": lambda h: [("d", *h[1:])],
}


@pytest.mark.parametrize("spoil", SPOILS)
def test_what_is_no_tiling_shows(spoil: str) -> None:
    seen = 0
    for seed in CASES:
        chance = random.Random(seed)
        held = state(chance)
        i = chance.randrange(len(held))
        key, _, part = held[i]
        others = sum(h[0] == key and h[2].numel > 0 for h in held) - 1
        # where it is the tensor's only part, what is left is another valid state
        if part.numel == 0 or (spoil in ("a gap", "another dtype", "another shape", "another key") and not others):
            continue
        if spoil == "another shape" and part.flat is None:
            continue  # the index refuses a box of another number of dimensions
        assert not holds(held[:i] + SPOILS[spoil](held[i]) + held[i + 1 :])
        seen += 1
    assert seen > 100


def test_an_overlap_that_is_as_large_as_the_gap_shows() -> None:
    seen = 0
    for seed in CASES:
        chance = random.Random(seed)
        held = state(chance)
        i = chance.randrange(len(held))
        key, dtype, part = held[i]
        other = moved(part)
        if part.numel == 0 or other is None:
            continue
        assert not holds([*held[:i], (key, dtype, other), *held[i + 1 :]])
        seen += 1
    assert seen > 100


def test_boxes_and_flat_ranges_do_not_make_up_for_each_other() -> None:
    shape = (4, 6)
    half, rest = Part(shape, (2, 6), (0, 0)), Part(shape, (2, 6), (2, 0))
    flat_half, flat_rest = Part(shape, (12,), None, (0, 12)), Part(shape, (12,), None, (12, 24))
    assert holds([("k", "int8", half), ("k", "int8", rest)])
    assert holds([("k", "int8", flat_half), ("k", "int8", flat_rest)])
    assert not holds([("k", "int8", half), ("k", "int8", flat_rest)])
    assert not holds([("k", "int8", flat_half), ("k", "int8", rest)])
    everything = Part.whole(shape)
    flat_everything = Part(shape, (24,), None, (0, 24))
    assert not holds([("k", "int8", everything), ("k", "int8", flat_everything)])


def test_every_whole_of_two_ranks_shows() -> None:
    assert not holds([("k", "int8", Part.whole(()))] * 2)
    assert not holds([("k", "int8", Part.whole((3,))), ("k", "int16", Part.whole((3,)))])
    assert holds([("k", "int8", Part.whole((0, 3)))] * 2)  # an empty tensor may be held twice


# --- cost
# -----------------------------------------------------------------------------------------


def seconds(call: Callable[[], object]) -> float:
    best = math.inf
    for _ in range(20):
        begin = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begin)
    return best


def test_cost() -> None:
    shape = (8192, 4096)
    box = Part(shape, (8192, 1024), (0, 1024))
    flat = Part(shape, (shape[0] * shape[1] // 2,), None, (100_000, 100_000 + shape[0] * shape[1] // 2))
    assert len(parts.intersect(box, flat)) > 4000
    assert seconds(lambda: parts.intersect(box, flat)) < 0.01
    assert seconds(lambda: parts.intersect(box, Part(shape, (8192, 1500), (0, 1500)))) < 0.01
    assert seconds(lambda: parts.intersect(box, Part(shape, (8192, 1024), (0, 2048)))) < 0.0001
    assert seconds(lambda: parts.intersect(flat, Part(shape, (8, 4096), (8184, 0)))) < 0.0001


@given(st.lists(st.integers(0, 7), max_size=4), st.integers(1, 50))
def test_boxes_cover_each_element_once(shape: list[int], most: int) -> None:
    seen = np.zeros(shape, int)
    for begin, size in parts.boxes(shape, most):
        assert int(np.prod(size)) <= most
        seen[(*(slice(b, b + n) for b, n in zip(begin, size, strict=True)), ...)] += 1
    assert (seen == 1).all()
