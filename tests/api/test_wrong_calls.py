"""Wrong calls, each with what the message must tell: the thing, and the remedy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import datastates as ds
from datastates.errors import ProviderError, RestoreError, SettingsError
from datastates.providers import (
    DTensorProvider,
    HostTensorProvider,
    PickledObjectProvider,
    from_state_dict,
    from_stateful,
)
from datastates.restoring.request import RestoreOptions


class Loop:
    def state_dict(self) -> dict[str, Any]:
        return {"step": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        del state


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    state = {"w": np.ones(3)}
    providers = [from_state_dict("model", state), PickledObjectProvider("loop", lambda: 1, lambda _: None)]
    ds.snapshot(providers, tmp_path / "c").wait_committed()
    return tmp_path / "c"


def test_a_provider_that_the_checkpoint_lacks_is_told_what_there_is(saved: Path) -> None:
    net = from_state_dict("net", {"w": np.zeros(3)})
    told = r"the checkpoint lacks 'net' \(it has 'loop', 'model'; restore\(rename=\{'OLD/': 'net/'\}\) finds arrays"
    with pytest.raises(RestoreError, match=told):
        ds.restore([net], saved)
    loop = PickledObjectProvider("loop", lambda: 1, lambda _: None)
    with pytest.raises(
        RestoreError, match=r"rename=\{'model/': 'net/'\}\) .*, strict=False restores the rest\)"
    ) as error:
        ds.restore([net, loop], saved)
    assert error.value.missing == ["net"]
    ds.restore([net, loop], saved, strict=False)
    with pytest.raises(RestoreError, match=r"lacks 'other' \(it has 'loop', 'model'; strict=False restores the rest"):
        ds.restore([PickledObjectProvider("other", lambda: 1, lambda _: None)], saved)
    live = {"w": np.zeros(3)}
    ds.restore([from_state_dict("net", live), loop], saved, rename={"model/": "net/"})  # as the message says
    assert live["w"].sum() == 3


CALLS: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "a class": (lambda _: from_stateful("m", Loop), TypeError, "'m': Loop is a class; give an object of it"),  # type: ignore[arg-type]
    "a list of arrays": (
        lambda _: HostTensorProvider("m", [np.ones(1)]),  # type: ignore[arg-type]
        TypeError,
        "'m': a mapping of keys to arrays is wanted, not a list",
    ),
    "no mapping": (lambda _: DTensorProvider("m", 3), TypeError, "'m': a mapping of keys to arrays is wanted"),  # type: ignore[arg-type]
    "keys": (
        lambda path: ds.export(path, path.with_name("o.pt"), keys=3),  # type: ignore[arg-type]
        TypeError,
        "keys: a glob is a string, got 3",
    ),
    "rename": (
        lambda path: ds.export(path, path.with_name("o.pt"), rename="a=b"),  # type: ignore[arg-type]
        TypeError,
        "rename: a mapping of old names to new ones is wanted, not a str",
    ),
    "an object": (
        lambda path: ds.snapshot([PickledObjectProvider("p", lambda: print.__self__, print)], path.with_name("o")),
        ProviderError,
        "'p': the module cannot be pickled",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_wrong_calls_name_what_is_wrong(name: str, saved: Path) -> None:
    call, kind, text = CALLS[name]
    with pytest.raises(kind) as error:
        call(saved)
    assert text in str(error.value)


def test_the_arguments_of_a_restore_are_the_fields_of_its_request() -> None:
    assert RestoreOptions.__optional_keys__ == {f.name for f in fields(ds.RestoreRequest)}


def test_an_unknown_argument_is_named(tmp_path: Path) -> None:
    with ds.Checkpointer(tmp_path) as checkpointer, pytest.raises(TypeError, match=r"'stric'; it has step, keys, re"):
        checkpointer.restore([], stric=False)  # type: ignore[call-arg]
    with pytest.raises(SettingsError, match=r"stric: unknown setting; settings are cast, .*strict, .*host_cache"):
        ds.restore([], tmp_path, stric=False)  # type: ignore[call-arg]
    with pytest.raises(SettingsError, match=r"strict: unknown setting; settings are cast, keys, .*host_cache"):
        ds.compare([], tmp_path, strict=False)  # type: ignore[call-arg]


def test_ranks_compare_every_field_of_their_requests() -> None:
    other = {"step": 1, "keys": "a*", "rename": {"a": "b"}, "cast": True, "verify": "digest", "fallback": True}
    own = {"strict": False, "trust": "all"}  # a rank may decide these alone
    assert {*other, *own} == {f.name for f in fields(ds.RestoreRequest)}
    plain = ds.RestoreRequest()
    wishes = {name: ds.RestoreRequest.of({name: value}).wish for name, value in {**other, **own}.items()}
    assert {name for name, wish in wishes.items() if wish != plain.wish} == {*other}
    assert len({*wishes.values()}) == 1 + len(other)
