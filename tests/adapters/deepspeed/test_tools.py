"""DeepSpeed's own tools read these checkpoints, with the same results as for torch's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long

SAVE = """
root = Path(sys.argv[1])
for stage in (1, 2, 3):
    for name, entry in (("torch", TORCH), ("ours", OURS)):
        trained = engine(stage, entry, "bf16")
        steps(trained, 0, 3)
        trained.save_checkpoint(root / f"{name}-{stage}", client_state={"next": 3})
        trained.destroy()
for stage in (2, 3):
    trained = engine(stage, OURS, "bf16", model=Net(tied=False))  # safetensors takes no tied ones
    steps(trained, 0, 1)
    trained.save_checkpoint(root / f"untied-{stage}")
    trained.destroy()
"""
READ = """
from deepspeed.checkpoint import DeepSpeedCheckpoint, ds_to_universal
from deepspeed.utils import zero_to_fp32

root = Path(sys.argv[1])

def same(make, what):
    # what a tool makes of both checkpoints
    theirs, made = make("torch"), make("ours")
    wrong = differences(theirs, made)
    assert not wrong, (what, wrong)
    return made

for stage in (1, 2, 3):
    state_of = lambda name: leaves(zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(root / f"{name}-{stage}"))
    made = same(state_of, f"zero_to_fp32 {stage}")
    wanted = {"/hidden.weight", "/head.weight", "/mean"} | ({"/frozen.weight"} if stage > 1 else set())
    assert wanted <= set(made), list(made)

    def universal(name):
        source = root / f"{name}-{stage}" / "global_step3"
        target = root / f"{name}-{stage}" / "universal"
        sys.argv[1:] = ["--input_folder", str(source), "--output_folder", str(target), "--inject_missing_state"]
        sys.argv += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
        ds_to_universal.main(ds_to_universal.parse_arguments())
        return {f"{file}{at}": leaf for file in names(target) if file.endswith(".pt")
                for at, leaf in content(target / file).items() if "/ds_config" not in at}

    made = same(universal, f"ds_to_universal {stage}")
    assert any(place.startswith("zero/hidden.weight/exp_avg.pt") for place in made), list(made)

    runs = []
    for name in ("torch", "ours"):
        entry = TORCH if name == "torch" else OURS
        trained = engine(stage, entry, checkpoint={"load_universal": True}, train_micro_batch_size_per_gpu=2 * ROWS)
        path, client = trained.load_checkpoint(root / f"{name}-{stage}", tag="universal")
        assert path and client["next"] == 3, (path, client)
        assert trained.global_steps == 3
        runs.append((steps(trained, 3, 6), state(trained)))
        trained.destroy()
    assert runs[0][0] == runs[1][0]
    assert runs[0][1] == runs[1][1], differences(runs[0][1], runs[1][1])

    if stage < 3:  # it knows no files of each rank's parameters
        def looked_at(name):
            found = DeepSpeedCheckpoint(str(root / f"{name}-{stage}" / "global_step3"))
            zero = [found.get_zero_checkpoint_state(0, 0, rank) for rank in range(found.dp_degree)]
            return leaves([found.dp_degree, found.tp_degree, found.pp_degree, found.get_iteration(),
                           [{key: value for key, value in part.items() if key != "ds_config"} for part in zero]])
        same(looked_at, f"DeepSpeedCheckpoint {stage}")
"""
TENSORS = """
from deepspeed.utils import zero_to_fp32
from safetensors.torch import load_file

for stage in (2, 3):
    root = Path(sys.argv[1]) / f"untied-{stage}"
    expected = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(root)
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(root, root / "safe", safe_serialization=True)
    made = load_file(root / "safe" / "model.safetensors")
    assert set(made) == set(expected) and len(made) > 7
    for key, tensor in expected.items():
        assert torch.equal(made[key], tensor.detach().float()), (stage, key)
"""


@pytest.fixture(scope="module")
def saved(module_train: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of two ranks by both engines, one for each stage of ZeRO."""
    root: Path = tmp_path_factory.mktemp("tools")
    module_train(2, SAVE, root)
    return root


@pytest.mark.by_hand
def test_they_see_what_they_see_in_torchs_files(saved: Path, train: Any) -> None:
    train(1, READ, saved)


def test_safetensors(saved: Path, train: Any) -> None:
    train(1, TENSORS, saved)
