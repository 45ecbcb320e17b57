"""Samples of tensors, which tell that a tensor was rewritten where torch does not count it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from datastates.state import dtensors
from datastates.state.strides import is_dense

WORDS = 32
"""Elements that are read of each tensor."""
_AS_WORDS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}

Samples = list[tuple[list[int], Any]]
"""For each device and element size: the numbers of the tensors, once for each element; and the elements."""


def take(tensors: Sequence[Any]) -> Samples:
    """Copy some elements of each torch tensor, in its device's memory. Memory that is not torch's own is left out."""
    import torch

    groups: dict[tuple[Any, Any], list[tuple[int, Any]]] = {}
    with torch.no_grad():
        for number, tensor in enumerate(tensors):
            local = dtensors.local(tensor)
            if local.numel() and local.untyped_storage().resizable():
                if local.is_complex():
                    local = torch.view_as_real(local.resolve_conj())
                words = local.view(getattr(torch, _AS_WORDS[local.element_size()]))
                groups.setdefault((words.device, words.dtype), []).append((number, _some(words)))
        return [
            ([n for number, some in group for n in [number] * len(some)], torch.cat([some for _, some in group]))
            for group in groups.values()
        ]


def differences(before: Samples, after: Samples) -> list[int]:
    """The numbers of the tensors whose samples differ."""
    found = {
        numbers[i]
        for (numbers, some), (_, others) in zip(before, after, strict=True)
        for i in (some != others).nonzero().ravel().tolist()
    }
    return sorted(found)


def _some(words: Any) -> Any:
    """Elements of a tensor at equal distances, the first and the last among them or near."""
    elements = words.numel()
    count = min(WORDS, elements)
    step = (elements - 1) // max(1, count - 1)
    if words.is_contiguous() or is_dense(words.shape, words.stride()):
        return words.as_strided((count,), (step,))
    import torch

    places = torch.arange(count) * step
    return words[torch.unravel_index(places, words.shape)]
