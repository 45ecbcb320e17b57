"""Megatron-Core's ``torch_dist``: DCP's tensors and ``common.pt``, saved by stock Megatron and by this package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import datastates as ds
from datastates.cli import commands
from datastates.errors import FormatError

pytest.importorskip("megatron.core")

HERE = Path(__file__).parents[1] / "adapters" / "megatron"
SAVE = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
from setting import *

if __name__ == "__main__":
    begin()
    strategies = {{"stock": TorchDistSaveShardedStrategy("torch_dist", 1), "ours": DataStatesSaveStrategy()}}
    for name, strategy in strategies.items():
        for layout in (Layout(tp=2), Layout(pp=2)):
            save(state(layout, 3), Path(sys.argv[1]) / f"{{name}}-{{layout.tp}}", strategy)
    end()
"""


@pytest.fixture(scope="module")
def saved(module_ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("megatron")
    module_ranks(2, SAVE, root, timeout=120, imported=(), TMPDIR=str(root.parent))
    return root


@pytest.mark.long
class TestMegatron:
    @pytest.mark.parametrize("layout", ["1", "2"])
    @pytest.mark.parametrize("name", ["stock", "ours"])
    def test_it_is_read_as_torch_reads_it(self, saved: Path, tmp_path: Path, name: str, layout: str) -> None:
        folder = saved / f"{name}-{layout}"
        dcp_to_torch_save(folder, tmp_path / "theirs.pt")
        theirs = torch.load(tmp_path / "theirs.pt", weights_only=False)
        tensors = {key: value for key, value in theirs.items() if isinstance(value, torch.Tensor)}
        assert {"decoder.weight", "norm", "uneven", "exp_avg", "glu_w", "glu_v", "scalar"} <= tensors.keys()
        with ds.open(folder) as opened:
            assert set(opened) == tensors.keys()
            assert all(torch.equal(opened[key], value) for key, value in tensors.items())
        found = ds.load(folder)
        assert found.pop("common")["iteration"] == 3
        assert all(torch.equal(found[key], value) for key, value in tensors.items())
        assert set(found) == theirs.keys()

    def test_the_commands_say_what_it_is(self, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
        for command in ("inspect", "verify"):
            assert commands.main([command, str(saved / "stock-2")]) == 0
            assert "a checkpoint of Megatron-Core (torch_dist)" in capsys.readouterr().out
        assert commands.main(["diff", str(saved / "stock-2"), str(saved / "ours-1")]) == 0


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (json.dumps({"sharded_backend": "zarr"}), "backend 'zarr'"),
        ("[]", "no description"),
        ("{", "no description"),
    ],
)
def test_another_backend_is_refused(tmp_path: Path, text: str, what: str) -> None:
    (tmp_path / ".metadata").touch()
    (tmp_path / "metadata.json").write_text(text)
    with pytest.raises(FormatError, match=what):
        ds.open(tmp_path)
