"""Hands restored objects to their providers, and collects the differences that only the objects can tell."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from datastates.errors import DatastatesError, ProviderError
from datastates.reading.tensors import Tensors
from datastates.restoring.compared import Compared
from datastates.restoring.restored import Restored, misfit, warn_of_rest
from datastates.restoring.saved_state import SavedState
from datastates.state.provider import StateProvider
from datastates.state.shards import Shard, full_key
from datastates.storage.location import Location

_RESTORED = "what was read in place and the objects before it are restored"


@dataclass(slots=True, eq=False)
class RestoredObject:
    """An object to hand to its provider.

    Attributes:
        provider: The provider.
        saved: The provider's saved state.
        shard: The object shard.
        targets: The provider's restored live arrays, by the keys that references in the object have.
        is_filled: Whether the live arrays are in the object, so only their contents may be missing.
    """

    provider: StateProvider
    saved: SavedState
    shard: Shard
    targets: dict[str, object]
    is_filled: bool = False

    def fill(self) -> None:
        """Put the live arrays into the object while they are being read, if the object needs no building."""
        self.is_filled = self.saved.fill(self.shard.key, self.targets)

    def hand_over(self, path: Location) -> None:
        """Give the object to its provider, now that its arrays are restored.

        Raises:
            ProviderError: The provider, or the live object, does not take the state.
        """
        key = self.shard.key
        value = self.saved.structure(key) if self.is_filled else self.saved.build(key, self.targets)
        if self.saved.cut is not None:
            value = self.saved.cut.prune(value, key)
        with naming(full_key(self.saved.name, key), path):
            self.provider.restore(self.shard, value)


@contextlib.contextmanager
def naming(key: str, path: Location) -> Iterator[None]:
    """Turn an error of a live object's own code into a ProviderError that names the object and the checkpoint."""
    try:
        yield
    except DatastatesError:
        raise
    except Exception as error:  # the object's own code may raise anything
        text = f"{key!r} does not take its state from {path}: {type(error).__name__}: {error}; {_RESTORED}"
        raise ProviderError(text) from error


class Late:
    """Collects the differences that providers report while they are given their objects."""

    def __init__(self, stored: Tensors, saved: Sequence[Compared], result: Restored) -> None:
        """Begin after the comparison, whose differences are in ``result`` already.

        Args:
            stored: The checkpoint.
            saved: The saved states of all providers, which collect their differences.
            result: The result of the restore.
        """
        self._stored = stored
        self._saved = saved
        self._told = [(len(s.missing), len(s.unexpected)) for s in saved]
        self._result = result

    def note(self, *, strict: bool) -> None:
        """Add the new differences to the result, and log them, or raise ProviderError if ``strict``."""
        result, late = self._result, Restored(self._result.step, self._result.path)
        for saved, (missing, unexpected) in zip(self._saved, self._told, strict=True):
            late.missing_keys += [key for key in saved.missing[missing:] if key not in result.missing_keys]
            late.unexpected_keys += [key for key in saved.unexpected[unexpected:] if key not in result.unexpected_keys]
        if strict and (late.missing_keys or late.unexpected_keys):
            raise ProviderError(f"{misfit(self._stored, late, {})}; {_RESTORED}")
        warn_of_rest(self._stored, late, {})
        result.missing_keys += late.missing_keys
        result.unexpected_keys += late.unexpected_keys
