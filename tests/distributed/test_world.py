"""Ranks that agree: real processes, over the Store of torch.distributed and over a shared directory."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

SECONDS = 2.0
"""Seconds that a rank waits for the others here."""

HEAD = f"""
import json, os, signal, sys, time
from pathlib import Path

from datastates.ranks.world import world_of
from datastates.errors import DatastatesError

SECONDS = {SECONDS}
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def report(**what):
    print(json.dumps(what), flush=True)


def joined(votes):
    return b"".join(votes[rank] for rank in sorted(votes))


def agree(world, name, timeout=SECONDS, decide=joined):
    begin, world.timeout = time.monotonic(), timeout
    try:
        answer = {{"answer": world.agree(name, b"<%d>" % RANK, decide).decode()}}
    except DatastatesError as error:
        ranks = list(getattr(error, "ranks", ()))
        answer = {{"error": type(error).__name__, "text": str(error), "ranks": ranks}}
    report(name=name, seconds=time.monotonic() - begin, **answer)
"""

STORE = f"""{HEAD}
import torch.distributed as dist

dist.init_process_group("gloo")
world = world_of(None, None, Path("ckpts"), SECONDS)
"""

DIRECTORY = f"""{HEAD}
world = world_of(RANK, SIZE, Path(sys.argv[1]), 20)
assert "torch" not in sys.modules
"""


def reports(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    """What a rank has reported, by name."""
    return {told["name"]: told for told in map(json.loads, done.stdout.splitlines())}


def test_over_the_store(ranks: Any) -> None:
    script = f"""{STORE}
agree(world, "first", 20)
for i in range(50):
    total = world.agree(f"many {{i}}", b"x" * RANK, lambda votes: b"%d" % len(joined(votes)))
    assert total == b"3"
large = bytes([RANK]) * (9 << 20)
answer = world.agree("large", large, lambda votes: votes[2] + votes[1])
assert answer == bytes([2]) * (9 << 20) + bytes([1]) * (9 << 20)
store = dist.distributed_c10d._get_default_store()
if RANK == 2:
    store.wait(["rank 0 has given up"])
agree(world, "straggler", 1)
if RANK == 0:
    store.set("rank 0 has given up", "yes")
agree(world, "after", 20)
other = world_of(None, None, Path("ckpts"), SECONDS)
report(name="tokens", tokens=[world.token("a"), world.token("b"), other.token("a")])
dist.barrier()
world.close()
other.close()
dist.barrier()
if RANK == 0:
    report(name="keys", keys=[key for key in store.list_keys() if "datastates" in key])
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # threads of torch that are left abort a process at times that ends by itself
"""
    told = [reports(done) for done in ranks(3, script)]
    for rank in range(3):
        assert told[rank]["first"]["answer"] == told[rank]["after"]["answer"] == "<0><1><2>"
        assert told[rank]["straggler"]["error"] == "RanksMissingError"
        assert told[rank]["straggler"]["text"] == "straggler: no answer from rank 2 within 0.8 s"
        assert told[rank]["straggler"]["ranks"] == [2]
        assert told[rank]["tokens"] == told[0]["tokens"]
    assert len(set(told[0]["tokens"]["tokens"])) == 3
    # the number of the last round stays, for a rank that comes late
    assert told[0]["keys"]["keys"] == ["datastates/ckpts/rounds"]


@pytest.mark.long
def test_killed_ranks_are_named_by_the_others(ranks: Any) -> None:
    """The first is a rank that the others wait for. The second is the coordinator, before it answers.

    The coordinator's process hosts the Store.
    """
    script = f"""
import os
points = {{"0": "barrier.publish=kill@3", "2": "barrier.post=kill@2"}}
os.environ["DATASTATES_FAULTS"] = points.get(os.environ["RANK"], "")
{STORE}
agree(world, "first", 20)
agree(world, "second")
agree(world, "third")
begin = time.monotonic()
world.close()
report(name="close", seconds=time.monotonic() - begin)
os._exit(0)  # the process group cannot be left without all ranks
"""
    done = ranks(4, script, may_fail=[0, 2])
    assert [done[rank].returncode for rank in (0, 2)] == [-signal.SIGKILL] * 2
    for rank in (0, 1, 3):
        told = reports(done[rank])
        assert told["first"]["answer"] == "<0><1><2><3>"
        assert told["second"]["text"] == "second: no answer from rank 2 within 1.6 s"
        assert told["second"]["ranks"] == [2]
        assert told["second"]["seconds"] < SECONDS
    for rank in (1, 3):
        told = reports(done[rank])
        assert told["third"]["error"] == "UnreachableError"
        assert f"the Store of torch.distributed is out of rank {rank}'s reach (" in told["third"]["text"]
        assert told["third"]["seconds"] < SECONDS + 1
        assert told["close"]["seconds"] < 1


@pytest.mark.by_hand
def test_a_frozen_coordinator_holds_nobody_up(ranks: Any) -> None:
    """Its process hosts the Store, keeps the connections and answers nothing."""
    script = f"""{STORE}
agree(world, "first", 20)
if RANK == 0:
    # thawed again by rank 1, when that has said what it has to say
    assert world.agree("pid", b"", lambda votes: b"%d" % os.getpid())
    agree(world, "second", 30, lambda votes: os.kill(os.getpid(), signal.SIGSTOP) or joined(votes))
else:
    coordinator = int(world.agree("pid", b"", joined))
    agree(world, "second")
    os.kill(coordinator, signal.SIGCONT)
    time.sleep(0.5)
    agree(world, "third", 20)
if RANK == 0:
    agree(world, "third", 20)
dist.barrier()
world.close()
dist.destroy_process_group()
os._exit(0)  # threads of torch that are left abort a process at times that ends by itself
"""
    done = ranks(2, script)
    told = [reports(each) for each in done]
    assert told[1]["second"]["error"] == "UnreachableError"
    assert "(no answer within 2 s)" in told[1]["second"]["text"]
    assert told[1]["second"]["seconds"] < 2 * SECONDS + 1
    assert [told[rank]["third"]["answer"] for rank in (0, 1)] == ["<0><1>"] * 2


@pytest.mark.long
def test_over_a_directory(ranks: Any, tmp_path: Path) -> None:
    """Without torch. Rank 2 is killed; then all ranks start again, in the directory with what is left."""
    script = f"""{DIRECTORY}
agree(world, "first", 20)
if RANK == 2 and sys.argv[2] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
agree(world, "second")
if sys.argv[2] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
world.close()
"""
    shared = tmp_path / "ckpts"
    killed = [reports(done) for done in ranks(4, script, shared, "kill", may_fail=range(4), imported=())]
    for rank in (0, 1, 3):
        assert killed[rank]["first"]["answer"] == "<0><1><2><3>"
        assert killed[rank]["second"]["text"] == "second: no answer from rank 2 within 1.6 s"
        assert killed[rank]["second"]["seconds"] < SECONDS
    assert list(shared.iterdir()) == [shared / ".ranks"]
    told = [reports(done) for done in ranks(4, script, shared, "go on", imported=())]
    assert {each[name]["answer"] for each in told for name in ("first", "second")} == {"<0><1><2><3>"}
    assert list(shared.iterdir()) == []


@pytest.mark.long
def test_a_coordinator_killed_in_a_directory_is_named(ranks: Any, tmp_path: Path) -> None:
    script = f"""
import os
if os.environ["RANK"] == "0":
    os.environ["DATASTATES_FAULTS"] = "barrier.decide=kill@3"  # the first is that of joining
{DIRECTORY}
agree(world, "first", 20)
agree(world, "second", 1)
"""
    done = ranks(3, script, tmp_path / "ckpts", may_fail=[0], imported=())
    assert done[0].returncode == -signal.SIGKILL
    for rank in (1, 2):
        told = reports(done[rank])
        assert told["first"]["answer"] == "<0><1><2>"
        assert told["second"]["ranks"] == [0]
        assert told["second"]["text"] == "second: rank 0 heard all and has not told within 2 s what came of it"
