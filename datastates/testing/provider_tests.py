"""The tests that every state provider must pass; subclass them in a file that pytest collects."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import datastates
from datastates.container.pickle_reader import Trust
from datastates.errors import RestoreError
from datastates.state import arrays, jax_arrays
from datastates.state.provider import StateProvider
from datastates.storage.location import Location


def equal(a: Any, b: Any) -> bool:
    """Whether two nested values are equal: the same types, keys and order of keys, and arrays that agree in every bit.

    Two arrays are equal if their library, dtype, shape and bits are. Their devices and strides may differ. NaNs of
    the same bits are equal. Typed random keys of JAX are equal if their implementation and numbers are. Dicts, lists
    and tuples are compared item by item, other objects by ``==``.

    Args:
        a: One value.
        b: The other.
    """
    return difference(a, b) is None


def difference(a: Any, b: Any, at: str = "state") -> str | None:
    """Describe the first place where :func:`equal` finds two nested values different; None if they are equal.

    Args:
        a: One value.
        b: The other.
        at: Name of the values, which the description begins with.
    """
    if jax_arrays.is_key(a) and jax_arrays.is_key(b):
        names = [jax_arrays.key_name(keys) for keys in (a, b)]
        if names[0] != names[1]:
            return f"{at}: random keys of {names[0]!r} are not of {names[1]!r}"
        return difference(jax_arrays.key_data(a), jax_arrays.key_data(b), at)
    kind = arrays.kind_of(a)
    if kind is not None or type(a) is not type(b):
        is_equal = kind is not None and kind == arrays.kind_of(b) and _same_bits(a, b)
        return None if is_equal else f"{at}: {_shown(a)} is not {_shown(b)}"
    if isinstance(a, dict):
        if list(a) != list(b):
            return f"{at}: keys {_shown(list(a))} are not {_shown(list(b))}"
        return next(filter(None, (difference(a[k], b[k], f"{at}[{k!r}]") for k in a)), None)
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return f"{at}: {len(a)} items are not {len(b)}: {_shown(a)}, {_shown(b)}"
        pairs = enumerate(zip(a, b, strict=True))
        return next(filter(None, (difference(x, y, f"{at}[{i}]") for i, (x, y) in pairs)), None)
    if isinstance(a, np.ndarray):  # of strings, objects or dates, which are pickled
        is_equal = a.dtype == b.dtype and np.array_equal(a, b)
    else:
        is_equal = bool(a == b) or (isinstance(a, float) and a != a and b != b)
    return None if is_equal else f"{at}: {_shown(a)} is not {_shown(b)}"


def _shown(value: Any) -> str:
    text = " ".join(repr(value).split())
    text = text if len(text) <= 200 else f"{text[:200]}..."
    if arrays.kind_of(value) is None:
        return text
    return f"{text} ({value.dtype}, shape {tuple(value.shape)})"


def _same_bits(a: Any, b: Any) -> bool:
    if a.dtype != b.dtype or tuple(a.shape) != tuple(b.shape):
        return False
    return _bits(a) == _bits(b)


def _bits(array: Any) -> bytes:
    match arrays.kind_of(array):
        case "torch":
            import torch

            flat = array.detach().cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)

            return bytes(flat.reshape(-1).view(torch.uint8).numpy().tobytes()) if flat.numel() else b""
        case "cupy":
            array = array.get()
    return bytes(np.ascontiguousarray(array).tobytes())


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
