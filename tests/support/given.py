"""A provider of the shards that it is given."""

from __future__ import annotations

from collections.abc import Sequence

from datastates.state.provider import StateProvider
from datastates.state.shards import Shard


class Given(StateProvider):
    """Saves those shards; a test restores them in its own way."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        super().__init__("s")
        self._shards = shards

    def shards(self) -> Sequence[Shard]:
        return self._shards
