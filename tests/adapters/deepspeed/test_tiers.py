"""Two ranks with DeepSpeed's engine resume on a fresh disk from a bucket alone, and half a tag never gets there."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from datastates.cli.commands import main
from datastates.draining.copies import Copies
from datastates.storage import Location

pytestmark = pytest.mark.long
SAVE = """
root, bucket = Path(sys.argv[1]), sys.argv[2]
for entry in (TORCH, {**OURS, "tiers": [{"path": bucket, "keep_last": 1}]}):
    trained = engine(2, entry)
    where = root.with_name("stock") if entry == TORCH else root
    steps(trained, 0, 2)
    trained.save_checkpoint(where)
    steps(trained, 2, 4)
    trained.save_checkpoint(where, client_state={"next": 4})
    losses = steps(trained, 4, 6)
    say("torch" if entry == TORCH else "ours", [losses, state(trained)])
    trained.destroy()
"""
RESUME = """
root = Path(sys.argv[1])
for entry in (TORCH, OURS):
    trained = engine(2, entry)
    path, client = trained.load_checkpoint(root)
    losses = steps(trained, client["next"], 6)
    say("torch" if entry == TORCH else "ours", [losses, state(trained)])
    trained.destroy()
"""


@pytest.mark.by_hand
def test_two_ranks_resume_from_the_bucket_alone(train: Any, said: Any, tmp_path: Path, bucket: str) -> None:
    root = tmp_path / "run"
    saved = [said(done) for done in train(2, SAVE, root, bucket)]
    assert [copy.name for copy in Copies(Location(bucket)).every().values()] == ["global_step4"]
    shutil.rmtree(root)
    assert main(["fetch", bucket, str(root)]) == 0
    assert {path.name for path in root.iterdir()} == {"global_step4", "latest"}
    resumed = [said(done) for done in train(2, RESUME, root)]
    for rank in range(2):
        assert saved[rank]["ours"] == saved[rank]["torch"]
        assert resumed[rank]["ours"] == resumed[rank]["torch"] == saved[rank]["torch"]


TORN = """
root, bucket = Path(sys.argv[1]), sys.argv[2]
trained = engine(2, {**OURS, "tiers": bucket, "rank_timeout": 5.0, "on_error": "warn"})
steps(trained, 0, 2)
trained.save_checkpoint(root)
ours(trained).wait()
if rank() == 1:
    arm("store.rename", "kill")
trained.save_checkpoint(root, tag="torn")
ours(trained).wait()
ours(trained).close()
os._exit(0)
"""
AFTER = """
root, bucket = Path(sys.argv[1]), sys.argv[2]
trained = engine(2, {**OURS, "tiers": bucket})
trained.load_checkpoint(root)
steps(trained, 2, 3)
trained.save_checkpoint(root)
trained.destroy()
"""


@pytest.mark.by_hand
def test_half_a_tag_stays_where_it_is(train: Any, tmp_path: Path, bucket: str) -> None:
    root = tmp_path / "run"
    train(2, TORN, root, bucket, may_fail=[0, 1])
    assert any((root / "torn").glob("*.pt")), "nothing was named before the rank was killed"
    assert main(["drain", str(root), bucket]) == 0
    train(2, AFTER, root, bucket)
    assert main(["drain", str(root), bucket]) == 0
    assert sorted(one.name for one in Copies(Location(bucket)).every().values()) == ["global_step2", "global_step3"]


REFUSED = """
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

root, bucket = Path(sys.argv[1]), sys.argv[2]
trained = engine(2, {**OURS, "tiers": [{"path": bucket}]})
texts = []
for set_up in ("alone", "node", "accelerate"):
    trained._config.use_node_local_storage = set_up == "node"
    if set_up == "accelerate":
        AcceleratorState._shared_state["distributed_type"] = DistributedType.DEEPSPEED
    try:
        trained.save_checkpoint(root, tag=set_up)
        texts.append("")
    except ValueError as error:
        texts.append(str(error))
say("texts", texts)
trained.destroy()
"""


@pytest.mark.by_hand
def test_a_folder_that_is_not_all_of_a_checkpoint_does_not_travel(
    train: Any, said: Any, tmp_path: Path, bucket: str
) -> None:
    pytest.importorskip("accelerate")
    for texts in (said(done)["texts"] for done in train(2, REFUSED, tmp_path / "run", bucket)):
        assert texts[0] == ""
        assert texts[1].startswith("tiers: with use_node_local_storage, each host has a part of a checkpoint: leave")
        assert texts[2].startswith("tiers: below accelerate and the Trainer, other files of a checkpoint lie beside")
    assert [one.name for one in Copies(Location(bucket)).every().values()] == ["alone"]
