"""Rebuilds a nested value from keys that spell its paths, such as the keys that :class:`ShardedZeroProvider` saves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from datastates.state.keys import parts
from datastates.state.provider import Saved
from datastates.state.shards import ArrayRef


@dataclass(eq=False)
class ByKey:
    """Nested dicts that are stored as arrays and one object. The keys of these are their paths in the dicts.

    Attributes:
        value: The nested dicts, with an ArrayRef for each array, and with the structure of the object.
        key: The object's key.
        targets: The live arrays that are restored, by key.
    """

    value: dict[Any, Any]
    key: str
    targets: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def of(cls, saved: Saved) -> ByKey | None:
        """Rebuild the dicts that all ranks saved together; None without exactly one object, or if a key is no path."""
        objects, known = saved.objects(), saved.arrays()
        if len(objects) != 1:
            return None
        value: dict[Any, Any] = {}
        try:
            for key in saved.every_key():
                _put(value, key, known[key])
            _put(value, objects[0], saved.structure(objects[0]))
        except ValueError:
            return None
        return cls(value, objects[0])

    def assemble(self, restored: object) -> dict[Any, Any]:
        """The nested dicts with the restored arrays and the restored object in them."""
        result: dict[Any, Any] = _over(self.value, self.targets)
        _put(result, self.key, restored)
        return result


def _over(item: Any, targets: Mapping[str, object]) -> Any:
    if isinstance(item, dict):
        return {k: _over(v, targets) for k, v in item.items()}
    return targets.get(item.key, item) if isinstance(item, ArrayRef) else item


def _put(value: dict[Any, Any], key: str, leaf: object) -> None:
    """Put a leaf at the path that a key spells; raises ValueError if the key is no path, or lies below another leaf."""
    *path, last = parts(key)
    for part in path:
        value = value.setdefault(part, {})
        if not isinstance(value, dict):
            raise ValueError(f"{key!r} is below a leaf")
    value[last] = leaf
