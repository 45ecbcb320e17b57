"""Sharded checkpoints of Lightning's strategies for FSDP: lazily captured, and Lightning's own folders."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from datastates.errors import SettingsError

torch = pytest.importorskip("torch")

HERE = Path(__file__).parent
IMPORTED = ("lightning.pytorch", "torch.distributed.fsdp")
BEGIN = f"""
import sys
sys.path[:0] = {[str(HERE), str(HERE.parents[1] / "support")]!r}
from hold import GATE, held
from sharded import *
from datastates import DatastatesError, _native

quiet()
directory = Path(sys.argv[1])
chosen = strategy()
checkpoints = attach(chosen, **OPTIONS)
"""


def run(ranks: Any, script: Path | str, *arguments: object) -> Any:
    return ranks(2, script, *arguments, timeout=200, imported=IMPORTED, PYTHONPATH=str(HERE), NODE_RANK="0")


@pytest.mark.by_hand
def test_capture_goes_on_in_forward_and_backward_and_the_update_waits(ranks: Any, tmp_path: Path) -> None:
    script = """
class Watch(pl.Callback):
    found = []
    def on_train_batch_start(self, trainer, module, batch, index):
        if trainer.global_step == BATCHES:
            self.snapshots = [s for each in checkpoints.snapshots.values() for s in each]
    def on_before_backward(self, trainer, module, loss):
        if trainer.global_step == BATCHES:
            self.found.append([s.captured for s in self.snapshots])

class Before(pl.Callback):
    def on_train_batch_end(self, trainer, module, *_):
        if trainer.global_step == BATCHES:
            self.expected = {name: t.full_tensor().clone() for name, t in module.state_dict().items()}

watch, before, module = Watch(), Before(), Sharded()
made = trainer(directory, BATCHES + 2, chosen, watch)
made.callbacks.insert(0, before)
with held("capture", until=GATE):
    made.fit(module, data())
assert watch.found == [[False]], watch.found
# the update came later: it changed the module, and not what was saved
import torch.distributed.checkpoint as dcp
(folder,) = directory.iterdir()
found = {name: torch.empty_like(tensor) for name, tensor in before.expected.items()}
dcp.load({"state_dict": found}, checkpoint_id=folder)
assert all(torch.equal(found[name], tensor) for name, tensor in before.expected.items())
assert not torch.equal(module.net[0].weight.full_tensor(), found["net.0.weight"])
leave()
"""
    run(ranks, BEGIN + script, tmp_path / "run")


@pytest.mark.by_hand
def test_copies_of_fsdp1_are_written_through_updates_and_lightning_resumes_bit_for_bit(
    ranks: Any, tmp_path: Path
) -> None:
    script = """
class Watch(pl.Callback):
    found = []
    def on_train_batch_end(self, trainer, module, *_):
        if trainer.global_step == BATCHES:
            _native.arm_fault("capture", "fail", 1)  # nothing is captured while this is armed
        if trainer.global_step == BATCHES + 1:
            self.found += [s.captured for each in checkpoints.snapshots.values() for s in each]
            _native.clear_faults()

def train(steps, strategy, folder, *callbacks, ckpt_path=None):
    torch.manual_seed(7)
    made, module = trainer(folder, steps, strategy), Wrapped()
    made.callbacks[:0] = callbacks
    made.fit(module, data(), ckpt_path=ckpt_path)
    with FSDP.summon_full_params(made.strategy.model, writeback=False):
        return module.losses, [t.detach().clone() for t in (*module.parameters(), *module.buffers())]

chosen, watch = fsdp1(), Watch()
checkpoints = attach(chosen, **OPTIONS)
train(2 * BATCHES + 1, chosen, directory / "ours", watch)
assert watch.found == [False], watch.found
(folder,) = (directory / "ours").iterdir()
assert sorted(path.name for path in folder.iterdir()) == [".metadata", "__0_0.distcp", "__1_0.distcp", "meta.pt"]
losses, state = train(2 * BATCHES + 3, fsdp1(), directory / "stock")
resumed, end = train(2 * BATCHES + 3, fsdp1(), directory / "resumed", ckpt_path=folder)
assert resumed == {step: loss for step, loss in losses.items() if step >= 2 * BATCHES} and len(resumed) == 3
assert len(end) == len(state) == 7 and all(map(torch.equal, end, state))
leave()
"""
    begin = BEGIN.replace("chosen = strategy()\ncheckpoints = attach(chosen, **OPTIONS)\n", "")
    run(ranks, begin + script, tmp_path / "run")


@pytest.mark.by_hand
def test_what_fails_on_one_rank_fails_on_all_and_the_last_one_stays(ranks: Any, tmp_path: Path) -> None:
    script = """
class Fail(pl.Callback):
    def on_train_batch_end(self, trainer, module, *_):
        if trainer.global_step == 2 * BATCHES and chosen.global_rank == 1:
            _native.arm_fault("write", "fail", ENOSPC, 1, 1)

made = trainer(directory, 2 * BATCHES + 1, chosen)
made.callbacks.insert(0, Fail())
try:
    made.fit(Sharded(), data())
except DatastatesError as error:
    assert "No space" in str(error), error
else:
    raise AssertionError("nothing was raised")
if chosen.is_global_zero:
    names = sorted(path.name for path in directory.iterdir())
    assert names == ["step=4.ckpt"], names
leave()
"""
    run(ranks, BEGIN + script.replace("ENOSPC", str(errno.ENOSPC)), tmp_path / "run")


@pytest.mark.by_hand
def test_one_rank_saves_its_shards_and_leaves_other_files(ranks: Any, tmp_path: Path) -> None:
    script = """
chosen = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1, process_group_backend="gloo")
attach(chosen, **OPTIONS)
made = trainer(directory, 2, chosen, devices=1, every_n_train_steps=2)
module = Sharded(64)
made.fit(module, data())
assert sorted(path.name for path in directory.iterdir()) == ["step=2.ckpt"]
saved = dict(module.state_dict())
import torch.distributed.checkpoint as dcp
found = {name: torch.empty(tensor.shape) for name, tensor in saved.items()}
dcp.load({"state_dict": found}, checkpoint_id=directory / "step=2.ckpt")
assert all(torch.equal(found[name], tensor.full_tensor()) for name, tensor in saved.items())

(directory / "others").mkdir()
(directory / "others" / "precious").write_text("x")
made.save_checkpoint(directory / "others")
names = {path.name for path in (directory / "others").iterdir()}
assert names == {"precious", ".metadata", "__0_0.distcp", "meta.pt"}, names  # at once: it has waited
leave()
"""
    ranks(1, BEGIN + script, tmp_path / "run", timeout=100, imported=IMPORTED, PYTHONPATH=str(HERE), NODE_RANK="0")


def test_what_it_cannot_do_is_refused() -> None:
    from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy

    from datastates.adapters.lightning import attach

    for strategy, hint in (
        (DDPStrategy(), "DataStatesCheckpointIO"),
        (FSDPStrategy(), 'state_dict_type="sharded"'),
        (ModelParallelStrategy(save_distributed_checkpoint=False), "save_distributed_checkpoint=True"),
    ):
        with pytest.raises(ValueError, match=hint):
            attach(strategy)
    strategy = ModelParallelStrategy()
    with pytest.raises(SettingsError, match="no_such"):
        attach(strategy, no_such=1)  # type: ignore[call-arg]
    attach(strategy)
    with pytest.raises(ValueError, match="has been called for it"):
        attach(strategy)


@pytest.mark.by_hand
def test_a_save_after_a_fit_leaves_no_more_threads_than_lightning(ranks: Any, tmp_path: Path) -> None:
    script = """
import threading
stock = strategy()
for name, each in (("stock", stock), ("ours", chosen)):
    made = trainer(directory / name, BATCHES, each)
    made.fit(Sharded(), data())
    before = {thread.name for thread in threading.enumerate()}
    made.save_checkpoint(directory / name / "after.ckpt")
    left = {thread.name for thread in threading.enumerate()} - before
    assert not left, (name, left)
    made.save_checkpoint(directory / name / "again.ckpt")
    if each.is_global_zero:
        names = {path.name for path in (directory / name / "again.ckpt").iterdir()}
        assert names >= {".metadata", "meta.pt"}, names
leave()
"""
    run(ranks, BEGIN + script, tmp_path / "run")
