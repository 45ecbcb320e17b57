"""``ProviderTests`` names the field and both values where a provider breaks its promises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import datastates as ds
from datastates.providers import PickledObjectProvider
from datastates.testing import ProviderTests
from datastates.testing.provider_tests import difference, equal


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ({"a": [1, 2]}, {"a": [1, 3]}, "state['a'][1]: 2 is not 3"),
        ({"a": 1}, {"b": 1}, "state: keys ['a'] are not ['b']"),
        ((1,), (1, 2), "state: 1 items are not 2: (1,), (1, 2)"),
        ({"w": 1}, {"w": 1.0}, "state['w']: 1 is not 1.0"),
        (
            np.zeros(2),
            np.ones(2),
            "state: array([0., 0.]) (float64, shape (2,)) is not array([1., 1.]) (float64, shape (2,))",
        ),
        (float("nan"), float("nan"), None),
        (np.array(["a"]), np.array(["a"]), None),
    ],
)
def test_the_first_difference_is_named(first: Any, second: Any, said: str | None) -> None:
    assert difference(first, second) == said
    assert equal(first, second) == (said is None)


class Forgetful(ProviderTests):
    """The suite for a provider that ignores what it is given to restore."""

    def provider(self) -> Any:
        live = {"epoch": 3}
        made = PickledObjectProvider("loop", lambda: dict(live), lambda _: None)
        made.live = live  # type: ignore[attr-defined]
        return made

    def perturb(self, provider: Any) -> None:
        provider.live["epoch"] += 1

    def state(self, provider: Any) -> object:
        return dict(provider.live)


def test_a_failure_names_the_field_and_both_values(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"state\(\)\['epoch'\]: 3 is not 4 \(wanted, then found\)"):
        Forgetful().test_restores_what_was_saved(tmp_path)


def test_two_shards_of_one_key_are_named() -> None:
    class Twice(Forgetful):
        def provider(self) -> Any:
            made = super().provider()
            made.shards = lambda: [ds.object_shard("x"), ds.object_shard("x")]
            return made

    with pytest.raises(AssertionError, match=r"several shards of one key: .*'x', 'object'"):
        Twice().test_keys_are_unique()
