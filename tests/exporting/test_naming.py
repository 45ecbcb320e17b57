"""Which tensors an export takes, and their names."""

from __future__ import annotations

import re

import pytest

from datastates.exporting.export import choose, names_of

KEYS = ["model/a.weight", "model/a.bias", "model/b.weight", "optimizer/a.weight/exp_avg"]


def test_globs_choose_full_keys_in_their_order() -> None:
    assert choose(KEYS, ["*"]) == KEYS
    assert choose(KEYS, ["*.weight", "model/a.*"]) == KEYS[:3]
    assert choose(KEYS, ["model/[ab].bias"]) == ["model/a.bias"]
    with pytest.raises(ValueError, match=r"no array .* matches 'head\*'"):
        choose(KEYS, ["model/*", "head*"])


def test_the_name_of_a_lone_provider_is_left_out() -> None:
    assert names_of(KEYS, {}) == {key: key for key in KEYS}
    assert names_of(KEYS[:2], {}) == {"model/a.weight": "a.weight", "model/a.bias": "a.bias"}
    assert names_of(["weights"], {}) == {"weights": "weights"}


def test_the_first_rename_that_matches_changes_a_name() -> None:
    renames = {"a.": "first.", re.compile(r"\.(\w)eight$"): r".\1", "b": "second"}
    with pytest.raises(ValueError, match="no name of an exported tensor matches 'b'"):
        names_of(KEYS[:3], renames)
    del renames["b"]
    assert list(names_of(KEYS[:3], renames).values()) == ["first.weight", "first.bias", "b.w"]


def test_names_that_meet_or_vanish_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'model/a.weight' and 'model/b.weight' would both be named 'w'"):
        names_of(KEYS[:3], {re.compile(r".\.weight"): "w"})
    with pytest.raises(ValueError, match=r"'model/a.bias' would get an empty name"):
        names_of(KEYS[:3], {"a.bias": ""})
