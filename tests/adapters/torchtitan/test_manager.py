"""The checkpoint manager for torchtitan, called through the interface that torchtitan's trainer uses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "torchtitan"
SUPPORT = Path(__file__).parents[2] / "support"
IMPORTED = ("torch.distributed.fsdp", "torchtitan.components.checkpointer")

TRAINING = """
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

from torchtitan.components.checkpointer import CheckpointManager
from datastates.adapters import torchtitan
from datastates.adapters.torchtitan import DataStatesCheckpointManager

sys.path.insert(0, SUPPORT)
from hold import held

dist.init_process_group("gloo")
folder = sys.argv[1]

class Optimizers:
    # names parameters, as torchtitan's container of optimizers does
    def __init__(self, model):
        self.model, self.own = model, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    def state_dict(self):
        return get_optimizer_state_dict(self.model, self.own)
    def load_state_dict(self, state):
        set_optimizer_state_dict(self.model, self.own, state)

class Trainer:
    # the order of calls of torchtitan's trainer
    def __init__(self, manager=DataStatesCheckpointManager, **config):
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 1024), torch.nn.Linear(1024, 512))
        fully_shard(self.model)
        self.optimizers = Optimizers(self.model)
        self.lr_schedulers = torch.optim.lr_scheduler.StepLR(self.optimizers.own, 2)
        self.step, self.losses, self.captured = 0, [], []
        made = {"enable": True, "interval": 2, "keep_latest_k": 2, "last_save_model_only": False, **config}
        if manager is DataStatesCheckpointManager:
            made["host_cache"] = "16MiB"
        self.checkpointer = manager.Config(**made).build(
            dataloader=None, model_parts=[self.model], optimizers=self.optimizers, lr_schedulers=self.lr_schedulers,
            states={"train_state": self}, sd_adapter=None, base_folder=folder,
        )
    def state_dict(self):
        return {"step": self.step}
    def load_state_dict(self, state):
        self.step = state["step"]
    def train(self, steps, until=None):
        self.checkpointer.load(step=-1)
        while self.step < (until or steps):
            self.step += 1
            generator = torch.Generator().manual_seed(10 * self.step + dist.get_rank())
            loss = self.model(torch.randn(4, 64, generator=generator)).square().mean()
            loss.backward()
            going = self.checkpointer.save_future
            self.captured.append(going is not None and going.captured)
            self.checkpointer.maybe_wait_for_staging()
            assert going is None or going.captured
            self.optimizers.own.step()
            self.lr_schedulers.step()
            self.optimizers.own.zero_grad()
            self.losses.append(loss.item())
            self.checkpointer.save(self.step, last_step=self.step == steps)

def full(model):
    return {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}

def same(first, second):
    return all(torch.equal(first[name], tensor) for name, tensor in second.items())
"""

ENDING = """
dist.barrier()
sys.stdout.flush()
os._exit(0)  # an interpreter with threads of gloo may abort at its end
"""

Run = Callable[[int, str], None]


@pytest.fixture
def run(ranks: Any, tmp_path: Path) -> Run:
    """Run a script, which may use all of the above, on several ranks: ``run(n, script)``."""

    def start(n: int, script: str) -> None:
        ranks(n, f"SUPPORT = {str(SUPPORT)!r}" + TRAINING + script + ENDING, tmp_path, timeout=120, imported=IMPORTED)

    return start


@pytest.mark.by_hand
def test_it_goes_on_and_keeps_what_it_is_told_to(run: Run) -> None:
    run(
        2,
        """
whole = Trainer(folder="whole")
whole.train(7)
whole.checkpointer.close()
dist.barrier()  # rank 0 deletes the old ones, and its close() waits for that
names = sorted(path.name for path in Path(folder, "whole").iterdir())
assert names == ["step-6", "step-7"], names

first = Trainer()
first.train(7, until=4)
first.checkpointer.close()
second = Trainer()
second.train(7)
second.checkpointer.close()
assert first.losses + second.losses == whole.losses
assert same(full(second.model), full(whole.model))
assert second.lr_schedulers.state_dict() == whole.lr_schedulers.state_dict()
""",
    )


@pytest.mark.by_hand
def test_the_update_waits_for_capture_and_a_stock_reader_loads_it(run: Run) -> None:
    run(
        2,
        """
trained = Trainer(interval=3)
save = trained.checkpointer.save
def saved(step, last_step=False):
    if step == 3:
        global expected
        expected = full(trained.model)
    return save(step, last_step)
trained.checkpointer.save = saved
with held("capture", until=(torchtitan, "wait_free")):
    trained.train(6, until=4)
assert trained.captured == [False] * 4, trained.captured
trained.checkpointer.close()
found = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
dcp.load(found, checkpoint_id=Path(folder, "checkpoint", "step-3"))
assert same(found, expected)
assert not same(full(trained.model), expected)

# the last one holds the model alone, of another type; nothing of it is taken for a checkpoint to go on from by others
last = Trainer(folder="last", last_save_model_only=True, export_dtype="bfloat16", load_only=False)
last.train(2)
last.checkpointer.close()
found = {name: torch.empty(tensor.shape, dtype=torch.bfloat16) for name, tensor in full(last.model).items()}
dcp.load(found, checkpoint_id=Path(folder, "last", "step-2"))
assert same(found, {name: tensor.bfloat16() for name, tensor in full(last.model).items()})

from_that = Trainer(folder="fresh", initial_load_path=str(Path(folder, "checkpoint", "step-3")))
assert from_that.checkpointer.load()
assert same(full(from_that.model), expected)
assert from_that.step == 0
from_that.checkpointer.close()
""",
    )


@pytest.mark.by_hand
def test_torchtitans_own_manager_loads_its_checkpoints_and_it_those(run: Run) -> None:
    run(
        2,
        """
kinds = (DataStatesCheckpointManager, CheckpointManager)
ends = []
for saves, loads in (kinds, kinds[::-1]):
    first = Trainer(saves, folder=saves.__name__)
    first.train(5, until=4)
    first.checkpointer.maybe_wait_for_saving()
    second = Trainer(loads, folder=saves.__name__, load_only=True)
    second.train(7)
    assert second.step == 7 and len(second.losses) == 3
    ends.append(full(second.model))
    for trained in (first, second):
        trained.checkpointer.close()
assert same(*ends)
""",
    )


def test_what_it_does_not_do_is_refused(run: Run) -> None:
    run(
        1,
        """
for bad in ({"initial_load_in_hf": True}, {"last_save_in_hf": True, "last_save_model_only": True}):
    try:
        Trainer(**bad)
    except ValueError as error:
        assert "Hugging Face" in str(error), error
    else:
        raise AssertionError(bad)
off = Trainer(enable=False).checkpointer
assert (off.load(), off.save(2), off.maybe_wait_for_staging(), off.close()) == (False, False, None, None)
missing = Trainer(folder="nothing").checkpointer
assert not missing.load()
try:
    missing.load(step=9)
except FileNotFoundError as error:
    assert "step 9" in str(error)
else:
    raise AssertionError
missing.close()
""",
    )


def test_it_is_named_in_the_configuration(run: Run) -> None:
    run(
        1,
        """
from dataclasses import dataclass, field
from torchtitan.config import Configurable
from torchtitan.config.override import OverrideConfig, apply_overrides, parse_cli_imports

class Root(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        # as the trainer's configuration
        checkpoint: object = field(default_factory=CheckpointManager.Config)

name = "datastates.adapters.torchtitan.lazy_checkpoints"
for word, host_cache in ((name, "auto"), (name + '={"host_cache": "32MiB"}', "32MiB")):
    root = Root.Config(checkpoint=CheckpointManager.Config(enable=True, interval=3, folder="f", async_mode="async"))
    (line,) = apply_overrides(OverrideConfig(imports=parse_cli_imports([word])), root)
    assert "DataStatesCheckpointManager" in line, line
    made = root.checkpoint
    assert type(made) is DataStatesCheckpointManager.Config
    assert (made.enable, made.interval, made.folder, made.host_cache) == (True, 3, "f", host_cache)
root.checkpoint = CheckpointManager.Config(last_save_in_hf=True)
try:
    apply_overrides(OverrideConfig(imports=[name]), root)
except ValueError as error:
    assert "Hugging Face" in str(error), error
else:
    raise AssertionError
""",
    )


@pytest.mark.by_hand
def test_the_example_gives_the_trainer_the_manager(run: Run) -> None:
    # torchtitan's models need Triton, so the model's configuration is a stand-in here
    run(
        1,
        f"""
from types import ModuleType, SimpleNamespace
models = ModuleType("torchtitan.models.llama3.config_registry")
models.llama3_debugmodel = lambda: SimpleNamespace(checkpoint=CheckpointManager.Config())
for name in ("torchtitan.models", "torchtitan.models.llama3"):
    sys.modules[name] = ModuleType(name)
sys.modules[models.__name__] = models
sys.path.insert(0, {str(EXAMPLE)!r})
from config_registry import llama3_debugmodel_lazily
made = Trainer(**{{k: getattr(llama3_debugmodel_lazily().checkpoint, k) for k in ("interval", "keep_latest_k")}})
made.train(21)
made.checkpointer.close()
names = sorted(path.name for path in Path(folder, "checkpoint").iterdir())
assert names == ["step-10", "step-20", "step-21"], names
""",
    )
