"""Which checkpoints are outdated: the choice from a list."""

from __future__ import annotations

import pytest
from object_place import ROOT, SHORT, Answers, commit

from datastates.commit import manifest, retention
from datastates.commit.object_tier import ObjectTier
from datastates.config import Keep
from datastates.storage import Location


def test_a_manifest_that_is_garbled_once_does_not_pass_for_the_newest(
    tier: ObjectTier, store: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its place in the order is a guess. It is whole when its files are looked at, a moment later."""
    paths = [commit(tier, step) for step in (1, 2, 3)]
    real, garbled = store.read, list[Location]()

    def flip(path: Location, offset: int, nbytes: int) -> bytes:
        data = real(path, offset, nbytes)
        if path != paths[0] / manifest.FILE or garbled:
            return data
        garbled.append(path)
        return bytes([data[0] ^ 1]) + data[1:]

    monkeypatch.setattr(store, "read", flip)
    other = ObjectTier(ROOT, SHORT)
    retention.retain(other, Keep(last=1))
    assert [one.path for one in other.checkpoints()] == [paths[0], paths[2]]
    retention.retain(other, Keep(last=1))
    assert [one.path for one in other.checkpoints()] == paths[2:]
