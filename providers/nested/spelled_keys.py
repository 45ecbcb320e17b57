"""A nested value that was saved key by key, as :class:`ShardedZeroProvider` saves one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from datastates.state.keys import parts
from datastates.state.provider import Saved
from datastates.state.shards import ArrayRef


@dataclass(eq=False)
class ByKey:
    """What the keys of a provider spell: nested dicts, with one object among the arrays.

    Attributes:
        value: The dicts, with an ArrayRef for each array.
        key: The object's key.
        targets: What has been restored, by key.
    """

    value: dict[Any, Any]
    key: str
    targets: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def of(cls, saved: Saved) -> ByKey | None:
        """What was saved, by all ranks together; None when the keys spell no such value."""
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
        """The value, over the arrays and the object that have been restored."""
        result: dict[Any, Any] = _over(self.value, self.targets)
        _put(result, self.key, restored)
        return result


def _over(item: Any, targets: Mapping[str, object]) -> Any:
    if isinstance(item, dict):
        return {k: _over(v, targets) for k, v in item.items()}
    return targets.get(item.key, item) if isinstance(item, ArrayRef) else item


def _put(value: dict[Any, Any], key: str, leaf: object) -> None:
    """Put a leaf where its key says; raises ValueError where that is below another leaf, or no path."""
    *path, last = parts(key)
    for part in path:
        value = value.setdefault(part, {})
        if not isinstance(value, dict):
            raise ValueError(f"{key!r} is below a leaf")
    value[last] = leaf
