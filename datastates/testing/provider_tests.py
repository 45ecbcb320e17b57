"""The tests that every state provider must pass; subclass them in a file that pytest collects."""

from __future__ import annotations

from typing import Any

import pytest

import datastates
from datastates.container.pickle_reader import Trust
from datastates.errors import RestoreError
from datastates.state.provider import StateProvider
from datastates.storage.location import Location
from datastates.testing.equality import difference


class ProviderTests:
    """Tests of what a provider promises.

    Write ``class TestMine(ProviderTests)`` and define :meth:`provider`, :meth:`perturb` and :meth:`state`.

    Attributes:
        trust: Trusted classes of the provider's objects, as for ``restore(trust=...)``; none by default.
    """

    trust: Trust = ()

    def provider(self) -> StateProvider:
        """Return a provider over new live state. Each call makes a new state with the same values."""
        raise NotImplementedError

    def perturb(self, provider: Any) -> None:
        """Change all of the provider's live state, in place where training changes it in place."""
        raise NotImplementedError

    def state(self, provider: Any) -> object:
        """Return a copy of the live state: numbers, strings, arrays and nested containers of them."""
        raise NotImplementedError

    def _save(self, provider: StateProvider, path: Location) -> None:
        datastates.snapshot([provider], path).wait_committed()

    def test_perturbing_changes_the_state(self) -> None:
        """``perturb()`` changes what ``state()`` returns; otherwise the other tests could not fail."""
        provider = self.provider()
        before = self.state(provider)
        self.perturb(provider)
        found = difference(before, self.state(provider))
        assert found is not None, f"perturb() changed nothing: state() gives {before!r:.400} before and after"

    def test_describing_changes_nothing(self) -> None:
        """``shards()`` changes no state, and describes the same each time."""
        provider = self.provider()
        before = self.state(provider)
        first, second = provider.shards(), provider.shards()
        told = [[(s.key, s.dtype, s.shape, s.lazy) for s in shards] for shards in (first, second)]
        _check(told[0], told[1], at="shards() as (key, dtype, shape, lazy)")
        _check(before, self.state(provider))

    def test_keys_are_unique(self) -> None:
        """No two objects share a key, nor two arrays but for different parts; each is either a box or a flat range."""
        shards = self.provider().shards()
        keys = [(s.key, "object" if s.is_object else f"array {s.part}") for s in shards]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        assert not twice, f"shards() gave several shards of one key: {twice}"
        for s in shards:
            is_placed = s.is_object or (s.offset is None) != (s.flat is None)
            assert is_placed, f"shard {s.key!r}: offset or flat must be None, and not both: {s.offset}, {s.flat}"

    def test_saving_changes_nothing(self, tmp_path: Location) -> None:
        """A snapshot does not change the state."""
        provider = self.provider()
        before = self.state(provider)
        self._save(provider, tmp_path / "saved")
        _check(before, self.state(provider))

    def test_restores_what_was_saved(self, tmp_path: Location) -> None:
        """A restore brings the saved state back after it has changed."""
        provider = self.provider()
        before = self.state(provider)
        self._save(provider, tmp_path / "saved")
        self.perturb(provider)
        datastates.restore([provider], tmp_path / "saved", trust=self.trust)
        _check(before, self.state(provider))

    def test_restores_into_a_new_process_state(self, tmp_path: Location) -> None:
        """A restore brings the saved state into another provider object, as in a new process."""
        provider = self.provider()
        before = self.state(provider)
        self._save(provider, tmp_path / "saved")
        other = self.provider()
        self.perturb(other)
        datastates.restore([other], tmp_path / "saved", trust=self.trust)
        _check(before, self.state(other))

    def test_snapshot_keeps_the_state_of_its_call(self, tmp_path: Location) -> None:
        """A change right after ``snapshot()``, or after the gate if there is lazy state, is not in the checkpoint."""
        provider = self.provider()
        before = self.state(provider)
        with datastates.Checkpointer(tmp_path) as checkpointer:
            checkpointer.snapshot([provider], step=0)
            if any(shard.lazy for shard in provider.shards()):
                checkpointer.gate()
            self.perturb(provider)
        datastates.restore([provider], tmp_path, trust=self.trust)
        _check(before, self.state(provider))

    def test_loads_without_the_provider(self, tmp_path: Location) -> None:
        """``load()`` opens the checkpoint without the provider and finds its state under the provider's name."""
        provider = self.provider()
        self._save(provider, tmp_path / "saved")
        found = list(datastates.load(tmp_path / "saved", trust=self.trust))
        assert found == [provider.name], f"the checkpoint holds {found}, not {[provider.name]}"

    def test_absence_is_an_error_that_changes_nothing(self, tmp_path: Location) -> None:
        """A restore of a checkpoint without this provider raises RestoreError with missing keys, changing nothing."""
        self._save(_Stranger(), tmp_path / "saved")
        provider = self.provider()
        before = self.state(provider)
        with pytest.raises(RestoreError) as caught:
            datastates.restore([provider], tmp_path / "saved", trust=self.trust)
        assert caught.value.missing, f"the error names no missing key: {caught.value}"
        _check(before, self.state(provider))


def _check(expected: object, found: object, at: str = "state()") -> None:
    """Fail if the values differ; the message names the first difference, with the wanted and the found value."""
    said = difference(expected, found, at)
    assert said is None, f"{said} (wanted, then found)"


class _Stranger(StateProvider):
    def __init__(self) -> None:
        super().__init__("somebody else's state")

    def shards(self) -> list[datastates.Shard]:
        return [datastates.object_shard("nothing")]

    def serialize(self, shard: datastates.Shard) -> bytes:
        del shard
        return datastates.dumps(None)
