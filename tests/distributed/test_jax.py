"""Processes of jax.distributed: they save, are killed, and restore together, and meet in JAX's coordination service."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from datastates.commit import directories

pytest.importorskip("jax", reason="JAX is not installed: its processes were NOT tried")

IMPORTED = ("jax", "msgpack", "numpy", "pydantic")

HEAD = f"""
import json, os, sys, time
from pathlib import Path

sys.path.insert(0, {str(Path(__file__).parent)!r})
import jax
from split_state import Split

import datastates as ds
from datastates._base import faults
from datastates.errors import DatastatesError

RANK, SIZE, DIRECTORY = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(sys.argv[1])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize("127.0.0.1:" + os.environ["MASTER_PORT"], SIZE, RANK)
client = jax._src.distributed.global_state.client
OPTIONS = dict(host_cache="8MiB", block="1MiB", on_error="warn")


def report(word, **what):
    print(json.dumps(dict(word=word, **what)), flush=True)


def state():
    return Split.rows("model", {{"w": (96, 40), "b": (33,)}}, RANK, SIZE)


def save(ckpt, step):
    begin = time.monotonic()
    try:
        ckpt.snapshot([state().fill(step)], step=step).wait_committed()
        outcome = dict(error=None)
    except DatastatesError as error:
        outcome = dict(error=type(error).__name__, text=str(error), ranks=list(getattr(error, "ranks", ())))
    report(f"save {{step}}", seconds=time.monotonic() - begin, **outcome)


def restore(ckpt):
    found = state()
    step = ckpt.restore([found]).step
    report("restore", step=step, wrong=found.wrong(step))


def all_are_here(name):
    client.wait_at_barrier(name, 60_000)
"""

SAVES = f"""{HEAD}
assert "torch" not in sys.modules
assert not jax._src.xla_bridge.backends_are_initialized()
with ds.Checkpointer(DIRECTORY, **OPTIONS) as ckpt:
    save(ckpt, 1)
assert not jax._src.xla_bridge.backends_are_initialized()
assert (jax.process_index(), jax.process_count()) == (RANK, SIZE)
all_are_here("closed")
report("keys", keys=[key for key, _ in client.key_value_dir_get_bytes("datastates/")])
all_are_here("looked")
try:
    ckpt = ds.Checkpointer(DIRECTORY, **(OPTIONS if RANK else {{**OPTIONS, "host_cache": "none"}}))
except DatastatesError as error:
    report("wrong setting", error=type(error).__name__, text=str(error))
all_are_here("refused")
ckpt = ds.Checkpointer(DIRECTORY, rank_timeout=2, **OPTIONS)
if RANK == 1:
    client.blocking_key_value_get("rank 0 has given up", 60_000)
save(ckpt, 2)
if RANK == 0:
    client.key_value_set("rank 0 has given up", "yes")
restore(ckpt)
ds._native.arm_fault("sync", "delay", 700, 1, 1)
pending = ckpt.snapshot([state().fill(3)], step=3)
report("pending", committed=pending.committed)  # and the process ends, without closing anything
"""

RANK_1_IS_KILLED = f"""{HEAD}
ckpt = ds.Checkpointer(DIRECTORY, rank_timeout=3, **OPTIONS)
restore(ckpt)
if RANK == 1:
    faults.arm(*faults.parse("barrier.post=kill"))
save(ckpt, 4)
os._exit(0)  # the end of a process waits for all others
"""

RANK_0_IS_KILLED = f"""{HEAD}
ckpt = ds.Checkpointer(DIRECTORY, rank_timeout=3, **OPTIONS)
restore(ckpt)
if RANK == 0:
    faults.arm(*faults.parse("barrier.decide=kill"))
save(ckpt, 5)
time.sleep(60)  # JAX ends this process
"""

Reports = list[dict[str, dict[str, Any]]]


@dataclass(frozen=True)
class Runs:
    """What three runs in one directory have told, and which steps were committed after each."""

    saves: Reports
    rank_1_is_killed: Reports
    rank_0_is_killed: Reports
    committed: list[list[int]]
    statuses: list[list[int]]


@pytest.fixture(scope="module")
def runs(module_ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    root = tmp_path_factory.mktemp("jax") / "ckpts"
    told, committed, statuses = [], [], []
    for script, may_fail in ((SAVES, ()), (RANK_1_IS_KILLED, [1]), (RANK_0_IS_KILLED, [0, 1])):
        done = module_ranks(2, script, root, imported=IMPORTED, may_fail=may_fail)
        told.append([{said["word"]: said for said in map(json.loads, d.stdout.splitlines())} for d in done])
        committed.append(list(directories.committed(root)))
        statuses.append([d.returncode for d in done])
    return Runs(*told, committed, statuses)


def test_processes_commit_together_without_starting_jaxs_devices(runs: Runs) -> None:
    assert [told["save 1"]["error"] for told in runs.saves] == [None, None]
    # the number of the last opening stays, for a rank that comes late
    assert [told["keys"]["keys"] for told in runs.saves] == [["datastates/ckpts%2Fopenings/value"]] * 2


def test_a_process_that_cannot_begin_tells_the_others(runs: Runs) -> None:
    first, second = (told["wrong setting"] for told in runs.saves)
    assert first["error"] == "SettingsError"
    assert second["error"] == "CommitError"
    assert first["text"] in second["text"]


def test_who_does_not_come_in_time_is_named_to_all(runs: Runs) -> None:
    for told in runs.saves:
        assert told["save 2"]["error"] == "RanksMissingError"
        assert told["save 2"]["ranks"] == [1]
        assert "no answer from rank 1 within 1.6 s" in told["save 2"]["text"]
        assert told["restore"] == {"word": "restore", "step": 1, "wrong": []}


def test_processes_end_only_after_the_commit(runs: Runs) -> None:
    assert [told["pending"]["committed"] for told in runs.saves] == [False, False]
    assert runs.statuses[0] == [0, 0]
    assert runs.committed[0] == [1, 3]


def test_a_killed_process_is_named_and_the_next_run_goes_on(runs: Runs) -> None:
    told = runs.rank_1_is_killed
    assert [each["restore"] for each in told] == [{"word": "restore", "step": 3, "wrong": []}] * 2
    assert runs.statuses[1] == [0, -signal.SIGKILL]
    assert told[0]["save 4"]["error"] == "RanksMissingError"
    assert told[0]["save 4"]["ranks"] == [1]
    assert runs.committed[1] == [1, 3]


def test_without_the_process_of_the_service_jax_ends_the_others_and_nothing_is_committed(runs: Runs) -> None:
    told = runs.rank_0_is_killed
    assert [each["restore"]["step"] for each in told] == [3, 3]
    assert runs.statuses[2] == [-signal.SIGKILL, -signal.SIGABRT]
    assert runs.committed[2] == [1, 3]
