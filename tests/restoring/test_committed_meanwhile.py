"""A checkpoint that is committed while a restore waits at the gate is found: the restore looks after the wait."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hold import held

import datastates as ds
from datastates import _native
from datastates.providers import from_state_dict
from datastates.saving import gate

SMALL: dict[str, Any] = {"host_cache": "2MiB", "block": "1MiB"}


def restored(path: Path) -> Any:
    live = {"w": np.zeros(9)}
    ds.restore([from_state_dict("s", live)], path, **SMALL)
    return live["w"]


def loaded(path: Path) -> Any:
    return ds.load(path, like={"s": {"w": np.zeros(9)}}, **SMALL)["s"]["w"]


@pytest.mark.parametrize("read", [restored, loaded])
def test_a_restore_looks_after_its_wait(
    read: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pass_all = gate.pass_all
    with held("sync"):
        saved = ds.snapshot([from_state_dict("s", {"w": np.arange(9.0)})], tmp_path / "c", **SMALL)

        def pass_while_it_is_committed() -> None:
            assert not (tmp_path / "c").exists()
            _native.clear_faults()
            saved.wait_committed()
            pass_all()

        monkeypatch.setattr(gate, "pass_all", pass_while_it_is_committed)
        assert read(tmp_path / "c").tolist() == list(range(9))
