"""Values other than arrays that a live state has and this rank's stored value lacks: other ranks' objects have them."""

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
    """What is to be added to this rank's stored value: paths, and values with arrays of the live state.

    Only the ranks that stored arrays of the live state are looked at: nothing is read of other ranks unless the state
    is divided otherwise than it was.
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
    """What lies at a path, in a tuple; None if nothing does."""
    for k in path:
        if isinstance(value, dict) and (own := own_key(value, k)) is not None:
            value = value[own[0]]
        elif isinstance(value, list) and isinstance(k, int) and k < len(value):
            value = value[k]
        else:
            return None
    return (value,)


def _with_stored(live: Any, stored: Any) -> Any:
    """A live value with the stored values in it. Arrays stay the live ones."""
    if _is_array(live) or isinstance(stored, (ArrayRef, Unbuilt)):
        return live
    if isinstance(live, dict) and isinstance(stored, dict):
        made = copy.copy(live)
        for k, item in live.items():
            if (own := own_key(stored, k)) is not None:
                made[k] = _with_stored(item, stored[own[0]])
        return made
    if isinstance(live, (list, tuple)) and isinstance(stored, (list, tuple)) and len(live) == len(stored):
        items = list(map(_with_stored, live, stored))
        return items if isinstance(live, list) else nested.with_items(live, items)
    return stored
