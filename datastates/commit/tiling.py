"""Whether the parts that ranks hold tile their logical tensors, by a sum that each rank makes alone. Pure."""

from __future__ import annotations

import hashlib
import math

from datastates.state.parts import Part

PRIME = 2**127 - 1
"""Covers are added modulo this."""


def _random(*what: object) -> int:
    """A number that looks random and is the same in every process."""
    return int.from_bytes(hashlib.blake2b(ascii(what).encode(), digest_size=16).digest(), "little")


def cover(key: str, dtype: str, part: Part) -> int:
    """A number modulo :data:`PRIME` by which parts prove that they tile their tensors.

    Let the :func:`claim` of every part of every rank differ. Then the covers of all parts add up to 0 modulo
    :data:`PRIME` if, and but for a chance below 2**-100 only if, every logical tensor is tiled exactly once by boxes or
    exactly once by flat ranges. The claims cannot be spared: twice a sum of 0 is 0 again.

    Args:
        key: The logical tensor's key.
        dtype: Its element type; parts of another type are parts of another tensor.
        part: What is held of it.
    """
    if part.is_whole:
        return 0
    return (_measure(key, dtype, part) - (_whole(key, dtype, part) if part.has_first else 0)) % PRIME


def _measure(key: str, dtype: str, part: Part) -> int:
    """Additive: disjoint parts of one kind have together the sum of theirs."""
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


def claim(key: str, part: Part) -> int | None:
    """A number below 2**128 that stands for the key, from the part that has the tensor's first element; else None."""
    return _random(key) if part.has_first else None
