"""Finds values of the live state that this rank's stored value lacks in the objects that other ranks stored."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from datastates.container.unbuilt import Unbuilt
from datastates.providers.nested.pairing import Differences
from datastates.providers.nested.sameness import own_key
from datastates.state import arrays, nested
from datastates.state.provider import Saved
from datastates.state.shards import ArrayRef


def stored_elsewhere(found: Differences, saved: Saved) -> Iterator[tuple[tuple[object, ...], object]]:
    """Yield the values to add to this rank's stored value, each with its path. Their arrays are live arrays.

    Only objects of ranks that stored arrays of the live state are read. So nothing of other ranks is read unless the
    state is now divided in another way than when it was saved.
    """
    held = [key for _, _, keys in found.added for key in keys]
    is_wanted = held and any(not _is_array(leaf) for _, live, _ in found.added for _, leaf in nested.leaves(live))
    others = list(saved.structures_beside("", held)) if is_wanted else []
    for path, live, keys in found.added:
        stored = next((at for at in (_at(other, path) for other in others) if at is not None), None)
        if stored is not None and not isinstance(stored[0], (ArrayRef, Unbuilt)):
            yield path, _with_stored(live, stored[0])
        elif keys:
            yield path, live


def _is_array(value: object) -> bool:
    return arrays.kind_of(value) is not None


def _at(value: Any, path: Sequence[object]) -> tuple[Any] | None:
    """The value at a path, in a tuple of one item; None if there is none."""
    for k in path:
        if isinstance(value, dict) and (own := own_key(value, k)) is not None:
            value = value[own[0]]
        elif isinstance(value, list) and isinstance(k, int) and k < len(value):
            value = value[k]
        else:
            return None
    return (value,)


def _with_stored(live: Any, stored: Any) -> Any:
    """Copy a live value, and replace the leaves in it by stored ones, except arrays."""
    if _is_array(live) or isinstance(stored, (ArrayRef, Unbuilt)):
        return live
    if isinstance(live, dict) and isinstance(stored, dict):
        made = copy.copy(live)
        for k, item in live.items():
            if (own := own_key(stored, k)) is not None:
                made[k] = _with_stored(item, stored[own[0]])
        return made
    if isinstance(live, (list, tuple)) and isinstance(stored, (list, tuple)) and len(live) == len(stored):
        items = [_with_stored(one, other) for one, other in zip(live, stored, strict=True)]
        return items if isinstance(live, list) else nested.with_items(live, items)
    return stored
