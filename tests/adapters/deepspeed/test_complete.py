"""A checkpoint is complete or clearly absent, and ``latest`` names a complete one at any time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from short import first


@pytest.mark.by_hand
def test_latest_comes_last(train: Any, tmp_path: Path) -> None:
    train(
        2,
        """
root = Path(sys.argv[1])
trained = engine(2)
steps(trained, 0, 1)
trained.save_checkpoint(root, tag="old")
ours(trained).wait()
dist.barrier()
inode = (root / "latest").stat().st_ino
seen = []
with watched(seen, lambda: (latest(root), len(written(root / "new")))):
    with held("sync") if rank() == 1 else contextlib.nullcontext():
        trained.save_checkpoint(root, tag="new")
        steps(trained, 1, 3)
        save = ours(trained).saves[-1]
        if rank() == 0:
            wait_for(lambda: all(r.state == "committed" for r in save.reports.values()), "the files of rank 0")
            assert not save.ended, "rank 0 did not wait for rank 1"
            assert latest(root) == "old"
            assert not written(root / "new"), "files of an incomplete checkpoint"
        dist.barrier()
    ours(trained).wait()
    assert latest(root) == "new"
# never empty, never the new one before all of its files
assert {tag for tag, _ in seen} <= {"old", "new"}, seen
assert {count for tag, count in seen if tag == "new"} <= {3}, seen
assert (root / "latest").stat().st_ino != inode, "latest was written in place"
assert not [name for name in names(root) if "partial" in name], names(root)

# a checkpoint that is not to be named
trained.save_checkpoint(root, tag="aside", save_latest=False)
ours(trained).wait()
assert latest(root) == "new"
assert len(list((root / "aside").glob("*.pt"))) == 3
trained.destroy()
""",
        tmp_path,
    )


@pytest.mark.by_hand
def test_saves_on_each_others_heels(train: Any, tmp_path: Path) -> None:
    train(
        2,
        """
root = Path(sys.argv[1])
trained = engine(2, {**OURS, "max_in_flight": 3})
steps(trained, 0, 1)
with fault("sync", "delay", 100):
    for number in range(6):
        trained.save_checkpoint(root / "row", tag=f"tag{number}")
        assert sum(not save.ended for save in ours(trained).saves) <= 3
        if number % 2:
            step(trained, number)
    # found without a tag, and waited for
    path, _ = trained.load_checkpoint(root / "row")
assert Path(path).parent.name == "tag5", path
assert all(len(list((root / "row" / f"tag{number}").glob("*.pt"))) == 3 for number in range(6)), names(root / "row")

# under the tag of before: the files are those of the second save, and never of both
for stage in (2, 3):
    if stage == 3:
        trained.destroy()
        trained = engine(3)
    again = root / f"again-{stage}"
    trained.save_checkpoint(again, tag="same", client_state={"save": 1})
    ours(trained).wait()
    dist.barrier()
    seen = []
    sight = lambda: sorted(entry.inode() for entry in os.scandir(again / "same") if entry.name.endswith(".pt"))
    first = sight()
    with fault("sync", "delay", 150), watched(seen, sight):
        trained.save_checkpoint(again, tag="same", client_state={"save": 2})
        steps(trained, 10, 12)
        ours(trained).wait()
    dist.barrier()
    _, client = trained.load_checkpoint(again)
    assert client["save"] == 2, client["save"]
    final = sight()
    assert not set(first) & set(final)
    mixed = [seen_at_once for seen_at_once in seen if set(seen_at_once) & set(first) and set(seen_at_once) & set(final)]
    assert not mixed, mixed
trained.destroy()
""",
        tmp_path,
    )


@pytest.mark.by_hand
def test_sixteen_bit_models(train: Any, tmp_path: Path) -> None:
    train(
        2,
        """
root = Path(sys.argv[1])
for stage in (0, 2, 3):
    zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
    for name, entry in (("torch", TORCH), ("ours", OURS)):
        trained = engine(stage, entry, zero_optimization=zero)
        steps(trained, 0, 2)
        if name == "ours":
            trained.save_checkpoint(root / f"beside-{stage}")
        assert trained.save_16bit_model(root / f"{name}-{stage}", "weights.bin")
        # at once, as with torch's engine
        dist.barrier()
        assert names(root / f"{name}-{stage}") == ["weights.bin"], names(root / f"{name}-{stage}")
        steps(trained, 2, 3)
        trained.destroy()
        dist.barrier()
    assert latest(root / f"beside-{stage}") == "global_step2"
    theirs, made = content(root / f"torch-{stage}" / "weights.bin"), content(root / f"ours-{stage}" / "weights.bin")
    assert differences(theirs, made) == []
    assert "/hidden.weight" in made
""",
        tmp_path,
    )


# how a script ends right after save_checkpoint(), and with which code
ENDS = {
    "the end of the script": ("", 0),
    "sys.exit": ("sys.exit(0)", 0),
    "an exception": ("raise RuntimeError('as it happens')", 1),
    "destroy twice": ("trained.destroy(); trained.destroy(); ours(trained); sys.exit(0)", 0),
    "the group destroyed": ("dist.barrier(); dist.destroy_process_group(); sys.exit(0)", 0),
}


@pytest.mark.by_hand
@pytest.mark.parametrize("how", first(ENDS, rest=pytest.mark.by_hand))
def test_a_script_that_ends(train: Any, tmp_path: Path, how: str) -> None:
    action, code = ENDS[how]
    done = train(
        2,
        f"""
root = Path(sys.argv[1])
trained = engine(2, OURS)
steps(trained, 0, 2)
trained.save_checkpoint(root, tag="early")
with fault("sync", "delay", 50):
    trained.save_checkpoint(root, tag="last")
arm("sync", "delay", 200)
end = lambda: None  # the interpreter's own end
{action}
""",
        tmp_path,
        may_fail=range(2),
    )
    for process in done:
        # torch's threads may abort the interpreter's shutdown, when all else is done
        assert process.returncode in (code, -6), process.stderr
        assert "has failed" not in process.stderr, process.stderr
    assert (tmp_path / "latest").read_text() == "last"
    for tag in ("early", "last"):
        assert len(list((tmp_path / tag).glob("*.pt"))) == 3
    assert not list(tmp_path.rglob("*.partial-*"))


@pytest.mark.long
def test_what_cannot_be_saved_and_what_cannot_be_set(train: Any, tmp_path: Path) -> None:
    train(
        2,
        """
root = Path(sys.argv[1])

def refused(kind, match, action):
    try:
        action()
    except kind as error:
        assert match in str(error), error
    else:
        raise AssertionError(f"no {kind.__name__}: {match}")

for stage in (2, 3):
    trained = engine(stage)
    steps(trained, 0, 1)
    trained.save_checkpoint(root / str(stage), tag="good")
    unpicklable = {"lock": threading.Lock()}
    # only those that write the client's state can fail
    if stage == 3 or rank() == 0:
        refused(Exception, "lock", lambda: trained.save_checkpoint(root / str(stage), "bad", unpicklable))
    else:
        trained.save_checkpoint(root / str(stage), "bad", unpicklable)
    steps(trained, 1, 2)
    for tag in ("after", "last"):
        try:
            trained.save_checkpoint(root / str(stage), tag=tag)
        except Exception as error:  # the failure is told to all at once
            assert tag == "last" and "lock" in str(error), (tag, error)
            trained.save_checkpoint(root / str(stage), tag=tag)
    trained.destroy()
    dist.barrier()
    assert latest(root / str(stage)) == "last"
    assert not list((root / str(stage) / "bad").glob("*.pt")), names(root)
    assert not [name for name in names(root) if "partial" in name], names(root)

# switched off: DeepSpeed's own way, at once
trained = engine(2, {"enabled": False})
steps(trained, 0, 1)
trained.save_checkpoint(root / "off")
assert latest(root / "off") == "global_step1"
assert not ours(trained).saves
path, _ = trained.load_checkpoint(root / "off")
assert path
trained.save_16bit_model(root / "off16")
trained.destroy()

for entry in ({}, None, True):
    trained = engine(2, entry)
    assert ours(trained).settings.max_in_flight == 2
    trained.destroy()
for entry, match in (
    ({"host_cache_siz": 1}, "datastates_ckpt: host_cache_siz: unknown setting"),
    ({"host_cache_size": -1}, "datastates_ckpt: host_cache"),
    ({"host_cache_size": 1, "host_cache": "1GiB"}, "host_cache says the same"),
    ({"on_error": "ignore"}, "datastates_ckpt: on_error"),
    ("16", "datastates_ckpt: '16'"),
):
    refused(RuntimeError, match, lambda: engine(2, entry))
""",
        tmp_path,
    )


@pytest.mark.long
def test_a_forked_child_neither_saves_nor_waits_and_loads_what_is_complete(train: Any, tmp_path: Path) -> None:
    train(
        1,
        """
from datastates.errors import SnapshotAbandonedError

trained = engine(2)
steps(trained, 0, 1)
before = sys.argv[1] + "/before.pt"
ours(trained).save({"n": torch.ones(2)}, before)
with held("sync"):
    trained.save_checkpoint(sys.argv[1])
    child = os.fork()
    if child == 0:
        assert ours(trained).load(before)["n"].tolist() == [1, 1]
        under_way = next(iter(ours(trained).saves[-1].snapshots))
        for call in (
            ours(trained).wait,
            lambda: ours(trained).save({"n": 1}, sys.argv[1] + "/alone.pt"),
            lambda: ours(trained).load(str(under_way)),
        ):
            try:
                call()
            except SnapshotAbandonedError:
                continue
            os._exit(1)
        ours(trained).close()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
ours(trained).wait()
assert latest(Path(sys.argv[1])) == "global_step1"
""",
        tmp_path,
    )
