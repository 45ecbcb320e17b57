"""Sharded training on one and two ranks: saved and loaded by either, and trained on to the same losses."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.by_hand
def test_training_goes_on_alike_on_any_number_of_ranks(train: Any, said: Any, tmp_path: Path) -> None:
    """From two ranks to two and to one, and from one to two, for each way to save and each reader."""
    write = """
root = Path(sys.argv[1])
net, optimizer = make()
steps(net, optimizer, 0, 2)
for how in ("stock", "ours", "thread", "snapshot"):
    save(how, root / how, net, optimizer)
say("losses", steps(net, optimizer, 2, 5))
for how in ("ours", "thread", "snapshot"):
    assert problems(root / how) == []
"""
    read = """
for root in map(Path, sys.argv[2:]):
    for writer in ("stock", "ours", "thread", "snapshot"):
        for reader in ("stock", "ours") if writer in ("ours", "stock") else ("ours",):
            net, optimizer = make(seed=7)
            steps(net, optimizer, 20, 21)
            load(reader, root / writer, net, optimizer)
            say(f"{root.name} {writer} {reader}", steps(net, optimizer, 2, 5))
"""
    two, one = tmp_path / "two", tmp_path / "one"
    done = {2: train(2, write + read, two, two), 1: train(1, write + read, one, one, two)}
    done[3] = train(2, read, "-", one)
    expected = said(done[2][0])["losses"]
    assert said(done[1][0])["losses"] == expected
    found = [(word, losses) for n in done for d in done[n] for word, losses in said(d).items()]
    assert len(found) == 2 * 7 + 13 + 2 * 6
    assert [word for word, losses in found if losses != expected] == []


@pytest.mark.long
def test_saving_while_sharded_training_goes_on(train: Any, tmp_path: Path) -> None:
    """Each checkpoint holds the state of its call, though the ranks step at different times."""
    train(
        2,
        """
root = Path(sys.argv[1])
net, optimizer = make()
steps(net, optimizer, 0, 1)
group = dist.new_group(backend="gloo")
writer = DataStatesStorageWriter(lazy=lambda *_: True, **SMALL)
for number, how in enumerate(("snapshot", "thread")):
    content = state(net, optimizer)
    norm = {k: v for k, v in content["model"].items() if "running" in k or "num_b" in k}
    content["model"] = {k: v for k, v in content["model"].items() if k not in norm}
    expected = whole(content)
    with fault("write", "delay", 100, on=number % 2):
        if how == "snapshot":
            wait = ours.async_save(content, root / how, storage_writer=writer).wait_committed
        else:
            wait = dcp.async_save(
                content, checkpoint_id=root / how, storage_writer=writer, process_group=group
            ).result
        steps(net, optimizer, 1, 3)
        wait()
    dist.barrier()
    for reader in ("ours", "stock"):
        same(loaded(root / how, expected, reader), expected)
""",
        tmp_path,
    )


@pytest.mark.long
def test_sharded_tensors_and_ranks_that_save_by_themselves(train: Any, tmp_path: Path) -> None:
    train(
        2,
        """
from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards
root = Path(sys.argv[1])
full = torch.arange(80_000, dtype=torch.float32).reshape(400, 200)

def sharded(plus):
    # two shards on each rank, not next to each other
    rows = [100 * rank(), 200 + 100 * rank()]
    parts = [full[r : r + 100] * plus + (plus == 0) for r in rows]
    shards = [Shard.from_tensor_and_offsets(part.clone(), [r, 0], rank()) for part, r in zip(parts, rows)]
    return init_from_local_shards(shards, 400, 200)

group = dist.new_group(backend="gloo")
for how in ("ours", "thread", "snapshot"):
    writer = DataStatesStorageWriter(**SMALL)
    content = {"w": sharded(1), "alike": torch.ones(50_000)}
    if how == "ours":
        dcp.save(content, checkpoint_id=root / how, storage_writer=writer)
    elif how == "thread":
        dcp.async_save(content, checkpoint_id=root / how, storage_writer=writer, process_group=group).result()
    else:
        ours.async_save(content, root / how, storage_writer=writer).wait_committed()
    dist.barrier()
    for reader in (DataStatesStorageReader, dcp.FileSystemReader):
        into = {"w": sharded(0), "alike": torch.zeros(50_000)}
        dcp.load(into, storage_reader=reader(root / how))
        for shard in into["w"].local_shards():
            row = shard.metadata.shard_offsets[0]
            assert torch.equal(shard.tensor, full[row : row + 100]), (how, reader, row)
        assert into["alike"].eq(1).all()
    assert problems(root / how) == []

# without collectives each rank has a checkpoint of its own
mine = {"w": torch.full((70_000,), float(rank())), "n": rank()}
dcp.save(mine, checkpoint_id=root / "own", storage_writer=DataStatesStorageWriter(**SMALL), use_collectives=False)
same(loaded(root / "own", mine), mine)
assert sorted(p.name for p in (root / "own").iterdir()) == [
    f"__{r}{end}" for r in range(2) for end in (".metadata", "_0.distcp")
]
warnings.filterwarnings("ignore", "torch.distributed is disabled")
dcp.save(mine, checkpoint_id=root / f"alone{rank()}", storage_writer=DataStatesStorageWriter(**SMALL), no_dist=True)
same(loaded(root / f"alone{rank()}", mine, "alone"), mine)
""",
        tmp_path,
    )


@pytest.mark.by_hand
def test_each_rank_reads_its_own_part(train: Any, tmp_path: Path) -> None:
    """Each rank reads little more than its own rows, however many ranks wrote them."""
    source = """
from torch.distributed.tensor import Shard, distribute_tensor
root = Path(sys.argv[1])
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
full = torch.arange(1 << 21, dtype=torch.float32).reshape(2048, 1024)
make = lambda plus: {f"w{i}": distribute_tensor(full * plus + i, mesh, [Shard(0)]) for i in range(3)}
for name in sys.argv[2:]:
    if name == "save":
        writer = DataStatesStorageWriter(**SMALL)
        dcp.save(make(1), checkpoint_id=root / str(dist.get_world_size()), storage_writer=writer)
        writer.close()
        continue
    content = make(0)
    reader = DataStatesStorageReader(root / name)
    dcp.load(content, storage_reader=reader)
    needed = 3 * full.nbytes // dist.get_world_size()
    assert reader.tally.needed_nbytes == needed, reader.tally
    assert reader.tally.read_nbytes < 1.1 * needed, reader.tally
    assert reader.tally.unverified_nbytes == 0
    same(whole(content), whole(make(1)))
"""
    train(2, source, tmp_path, "save", "2")
    train(1, source, tmp_path, "save", "1", "2")
    train(2, source, tmp_path, "1")


@pytest.mark.by_hand
def test_a_rank_that_is_killed_while_it_writes(train: Any, tmp_path: Path) -> None:
    for victim in (1, 0):
        done = train(
            2,
            """
from datastates.errors import DatastatesError
root, victim = Path(sys.argv[1]), int(sys.argv[2])
net, optimizer = make(seed=3)
writer = DataStatesStorageWriter(rank_timeout=3, **SMALL)
ours.async_save(state(net, optimizer), root, storage_writer=writer).wait_committed()
dist.barrier()
expected = whole(state(net, optimizer))
steps(net, optimizer, 0, 1)
dist.barrier()
content = state(net, optimizer)
dist.barrier()
if rank() == victim:
    arm("write", "kill")
snapshot = ours.async_save(content, root, storage_writer=writer)
if rank() == victim:
    time.sleep(60)
begin = time.monotonic()
for p in net.parameters():
    p.grad = None
optimizer.step()
assert time.monotonic() - begin < 5, "the optimizer waited for the storage"
try:
    snapshot.wait_committed(30)
except DatastatesError as error:
    say("error", f"{type(error).__name__}: {error}")
else:
    raise AssertionError("it was committed without a rank")
same(loaded(root, {"model": expected["model"]}, "alone")["model"], expected["model"])
os._exit(0)
""",
            tmp_path / str(victim),
            victim,
            may_fail=(victim,),
            timeout=60,
        )
        assert done[victim].returncode == -signal.SIGKILL, done[victim].stderr
        assert f"rank {victim}" in done[1 - victim].stdout


PROCESS = """
import sys
sys.path.insert(0, sys.argv[2])
from training import *
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

def main(root):
    begin()
    module = nn.Linear(600, 300)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    content = {"w": module.weight, "n": 5}
    expected = whole(content)
    writer = DataStatesStorageWriter(**SMALL)
    copying = {"async_stager": DefaultStager(StagingOptions(False, False, False, False))}
    process = {"storage_writer": writer, "async_checkpointer_type": AsyncCheckpointerType.PROCESS}
    for name in ("first", "second"):
        dcp.async_save(content, checkpoint_id=root / name, **process, **copying).result(100)
        same(loaded(root / name, expected), expected)
    refused = dcp.async_save(content, checkpoint_id=root / "lazy", **process)
    module.weight.grad = torch.ones_like(module.weight)
    began = time.monotonic()
    optimizer.step()
    assert time.monotonic() - began < 20
    assert "DefaultStager" in str(refused.exception(30)), refused.exception()
    assert not module.weight.is_shared()
    dcp.async_save(content, checkpoint_id=root / "thread", storage_writer=writer).result(30)
    writer.close()
    end()

if __name__ == "__main__":  # the process that saves imports this file, too
    main(Path(sys.argv[1]))
"""


@pytest.mark.by_hand
def test_another_process_saves_what_torch_has_copied_and_refuses_what_is_lazy(ranks: Any, tmp_path: Path) -> None:
    ranks(1, PROCESS, tmp_path, Path(__file__).parent, timeout=150)
