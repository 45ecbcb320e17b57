"""What FSDP of version 1 leaves alone is no copy in its state dicts: an optimizer waits until it is captured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.mark.long
def test_a_sharded_parameter_that_fsdp1_ignores_is_saved_as_of_the_call(train: Any, tmp_path: Path) -> None:
    train(
        2,
        """
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardedOptimStateDictConfig, ShardedStateDictConfig, StateDictType
from torch.distributed.tensor import Shard, distribute_tensor
from datastates.adapters.shared.sharded_folders import ShardedFolders
from datastates.files.settings import FolderSettings
from hold import GATE, held

class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.wrapped = nn.Linear(256, 256)
        self.ignored = nn.Parameter(distribute_tensor(torch.rand(512, 256), mesh, [Shard(0)]))

    def forward(self, rows):
        return self.wrapped(rows).sum() + self.ignored.to_local().square().sum()

root, mesh = Path(sys.argv[1]), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
mixed = Mixed()
options = {"ignored_states": [mixed.ignored], "device_id": torch.device("cpu"), "use_orig_params": True}
model = FSDP(mixed, device_mesh=mesh, **options)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

def update():
    model(torch.ones(2, 256)).backward()
    optimizer.step()

def content():
    configs = ShardedStateDictConfig(), ShardedOptimStateDictConfig()
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, *configs):
        return {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)}

def locals_of(content):
    # copies of this rank's parts, by parameter and state
    named = [*content["model"].items()]
    named += [(f"{name} {k}", v) for name, kept in content["optimizer"]["state"].items() for k, v in kept.items()]
    return {name: (t.to_local() if isinstance(t, DTensor) else t).detach().clone() for name, t in named}

update()
expected, snapshots = locals_of(content()), []
folders = ShardedFolders(FolderSettings.of({}))
with folders.writing(root, [model], [optimizer], snapshots, fsdp1=True), held("capture", until=GATE):
    dcp.save(content(), checkpoint_id=root / "saved")
    update()
snapshots[0].wait_committed()
found = content()
dcp.load(found, checkpoint_id=root / "saved")
assert [name for name, part in locals_of(found).items() if not torch.equal(part, expected[name])] == []
folders.close()
""",
        tmp_path,
    )
