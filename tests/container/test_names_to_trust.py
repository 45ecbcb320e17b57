"""An error about trust names all classes at once, and nothing of them runs."""

from __future__ import annotations

import argparse
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import datastates as ds
from datastates.container import pickle_reader
from datastates.errors import TrustError
from datastates.providers import from_state_dict

pytestmark = pytest.mark.usefixtures("nothing_declared")

STATE = {"a": SimpleNamespace(n=1), "b": [argparse.Namespace(w=SimpleNamespace())], "c": print}
NAMES = ("types.SimpleNamespace", "argparse.Namespace", "builtins.print")


@pytest.mark.parametrize("protocol", [2, 4])
def test_all_names_are_told(protocol: int) -> None:
    data = pickle.dumps(STATE, protocol)
    with pytest.raises(TrustError) as caught:
        pickle_reader.loads(data)
    assert caught.value.names == NAMES
    assert f"trust={list(NAMES)} if you trust" in str(caught.value)
    with pytest.raises(TrustError) as caught:
        pickle_reader.loads(data, trust=NAMES[:1])
    assert caught.value.names == NAMES[1:]
    assert str(pickle_reader.loads(data, trust=NAMES)) == str(STATE)


def test_a_pickle_that_is_damaged_behind_the_first_name() -> None:
    data = pickle.dumps(STATE, 2)
    with pytest.raises(TrustError) as caught:
        pickle_reader.loads(data[: len(data) // 2])
    assert caught.value.name == NAMES[0]


def test_of_a_checkpoint(tmp_path: Path) -> None:
    provider = from_state_dict("s", {**STATE, "w": np.ones(2)})
    ds.snapshot([provider], tmp_path / "c").wait_committed()
    with pytest.raises(TrustError) as caught:
        ds.load(tmp_path / "c")
    assert caught.value.names == NAMES
    with pytest.raises(TrustError) as caught:
        ds.restore([provider], tmp_path / "c")
    assert caught.value.names == NAMES


def test_a_package_that_is_not_imported_may_declare_its_classes(tmp_path: Path) -> None:
    ds.snapshot([from_state_dict("s", {"a": argparse.Namespace()})], tmp_path / "c").wait_committed()
    script = f"import datastates as ds, sys; sys.modules.pop('argparse', None); ds.load({str(tmp_path / 'c')!r})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "if you trust this file, or import argparse if it declares its classes to torch" in done.stderr
