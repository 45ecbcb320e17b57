"""DeepSpeed: these files are read as what ``zero_to_fp32`` puts together, for each stage and number of ranks."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import short
import torch
from deepspeed_ranks import RANKS
from safetensors.torch import load_file

import datastates as ds
from datastates.cli import commands
from datastates.errors import FormatError, StorageError

pytest.importorskip("deepspeed")

TRAINING = Path(__file__).parents[1] / "adapters" / "deepspeed"
SAVE = f"""
import sys
sys.path.insert(0, {str(TRAINING)!r})
from training import *

begin()
root = Path(sys.argv[1])
for stage in (1, 2, 3):
    for name, entry in (("torch", TORCH), ("ours", OURS)):
        trained = engine(stage, entry, "bf16")
        steps(trained, 0, 2)
        trained.save_checkpoint(root / f"{{name}}-{{stage}}")
        trained.destroy()
end()
"""
READ = """
import sys
from pathlib import Path
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

for root in list(Path(sys.argv[1]).iterdir()):
    state = {k: v.clone() for k, v in get_fp32_state_dict_from_zero_checkpoint(root).items()}
    torch.save(state, Path(sys.argv[2]) / root.name)
"""
TAG = "global_step2"
OPTIMIZER = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


@pytest.fixture(scope="module", params=[2, 3])
def saved(request: pytest.FixtureRequest, module_ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("deepspeed")
    module_ranks(request.param, SAVE, root, **RANKS)
    return root


@pytest.fixture(scope="module")
def theirs(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What DeepSpeed's own script reads, in a file with the name of the checkpoint. It runs in one process for all."""
    folder = tmp_path_factory.mktemp("theirs")
    environment = {"DS_ACCELERATOR": "cpu", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", READ, saved, folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved / "torch-2" / TAG, tmp_path / "copy")
    return tmp_path / "copy"


def optimizer(folder: Path, rank: int) -> Path:
    return next(folder.glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"))


@pytest.mark.long
class TestDeepSpeed:
    @pytest.mark.parametrize("stage", short.first([2, 1, 3], rest=pytest.mark.by_hand))
    @pytest.mark.parametrize("name", ["torch", "ours"])
    def test_parameters_are_put_together(
        self, saved: Path, theirs: Path, tmp_path: Path, stage: int, name: str
    ) -> None:
        root = saved / f"{name}-{stage}"
        expected = torch.load(theirs / root.name)
        found = ds.load(root)
        assert set(found) >= set(expected)
        assert set(found) - set(expected) <= {"frozen.weight", "frozen.bias"}  # theirs leaves these out with ZeRO-1
        for key, tensor in expected.items():
            read = found[key]
            assert torch.equal(read.float() if key == "mean" else read, tensor), key  # a buffer stays as it was saved
            assert read.dtype == tensor.dtype or key == "mean", key
        with ds.open(root / TAG) as opened:
            assert opened.step == 2
            assert set(opened) == set(found)
            assert all(torch.equal(opened[key], value) for key, value in found.items())
        done = ds.export(root, tmp_path / "out.safetensors", step=2)
        assert done.tied == {"head.weight": "embedding.weight"} or done.tied == {"embedding.weight": "head.weight"}
        written = load_file(tmp_path / "out.safetensors")
        assert all(torch.equal(tensor, found[key]) for key, tensor in written.items())

    @pytest.mark.parametrize(
        ("before", "how"), [("sys.modules['torch'] = None", ""), ("", ", framework='np'")], ids=["absent", "unwanted"]
    )
    def test_without_torch_they_are_arrays(self, saved: Path, before: str, how: str) -> None:
        code = (
            f"import sys; {before}\n"
            "import datastates as ds\n"
            f"with ds.open(sys.argv[1]{how}) as opened: print(opened['hidden.weight'].tolist())\n"
            f"assert {{type(array).__name__ for array in ds.load(sys.argv[1]{how}).values()}} == {{'ndarray'}}\n"
            "assert not sys.modules.get('torch')\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, saved / "torch-3"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        with ds.open(saved / "torch-3") as opened:
            assert done.stdout == f"{opened['hidden.weight'].tolist()}\n"

    def test_the_commands_say_what_it_is(self, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
        for command in ("inspect", "verify"):
            assert commands.main([command, str(saved / "torch-3")]) == 0
            assert "a checkpoint of DeepSpeed with ZeRO" in capsys.readouterr().out

    def test_a_flipped_byte_is_found(self, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
        file = optimizer(copy, 1)
        data = bytearray(file.read_bytes())
        part = ds.open(copy)["back.weight"].reshape(-1)[-40:].numpy().tobytes()
        file = next(one for one in copy.iterdir() if part in one.read_bytes())
        data = bytearray(file.read_bytes())
        data[data.index(part)] ^= 1
        file.write_bytes(data)
        assert commands.main(["verify", str(copy)]) == 1
        assert file.name in capsys.readouterr().out

    def test_a_missing_rank_is_named(self, copy: Path) -> None:
        file = optimizer(copy, 1)
        file.unlink()
        with pytest.raises(StorageError, match=file.name):
            ds.open(copy)

    def test_a_missing_model_file_is_named(self, copy: Path) -> None:
        (copy / "mp_rank_00_model_states.pt").unlink()
        with pytest.raises(StorageError, match="mp_rank_00_model_states"):
            ds.open(copy)

    def test_a_file_that_was_cut_short_is_named(self, copy: Path) -> None:
        with optimizer(copy, 0).open("r+b") as opened:
            opened.truncate(5000)
        with pytest.raises(FormatError, match=optimizer(copy, 0).name):
            ds.load(copy)

    @pytest.mark.parametrize(
        ("change", "what"),
        [
            (
                lambda model: model["param_shapes"][0].update(new=torch.Size([10**12])),
                "no rank has any element of 'new'",
            ),
            (lambda model: model["param_shapes"][0].update({"back.bias": torch.Size([10**12])}), "only a part"),
            (lambda model: model.pop("param_shapes"), "param_shapes"),
            (lambda model: model.update(param_shapes=3), "no checkpoint of ZeRO"),
            (lambda model: model.update(module=None), "pipeline"),
        ],
    )
    def test_a_model_that_contradicts_is_refused(
        self, copy: Path, change: Callable[[dict[str, Any]], object], what: str
    ) -> None:
        path = copy / "mp_rank_00_model_states.pt"
        model = torch.load(path, weights_only=False)
        change(model)
        torch.save(model, path)
        with pytest.raises(ds.errors.DatastatesError, match=what):
            dict(ds.open(copy))


def fake(folder: Path, **optimizer_state: Any) -> Path:
    name = folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": {"zero_stage": 1, "partition_count": 1, **optimizer_state}}, name)
    return name


@pytest.mark.parametrize(
    ("state", "what"),
    [
        ({"partition_count": 10**9}, "of 1000000000 ranks: zero_pp_rank_1_"),  # nothing is made for each of them
        ({"partition_count": []}, "no checkpoint of ZeRO"),
        ({"partition_count": "x"}, "how many ranks"),
        ({"zero_stage": "x"}, "no checkpoint of ZeRO"),
    ],
)
def test_numbers_that_cannot_be(tmp_path: Path, state: dict[str, Any], what: str) -> None:
    fake(tmp_path, **state)
    with pytest.raises((FormatError, StorageError), match=what):
        ds.open(tmp_path)


def test_two_optimizer_files_of_one_rank_are_refused(tmp_path: Path) -> None:
    name = fake(tmp_path)
    shutil.copy(name, tmp_path / f"bf16_{name.name}")
    with pytest.raises(FormatError, match="two optimizer files of one rank"):
        ds.open(tmp_path)
