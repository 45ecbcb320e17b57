"""Checks that the ranks' parts tile their logical tensors, by a sum that each rank computes alone. No I/O."""

from __future__ import annotations

import hashlib
import math

from datastates.state.parts import Part

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
