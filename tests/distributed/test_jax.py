"""Processes of jax.distributed: they save, are killed, and restore together, and meet in JAX's coordination service."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax_meshes
import numpy as np
import pytest
from jax_ranks import HEAD, RANKS, Reports, reports
from safetensors.numpy import save_file

import datastates as ds
from datastates.commit import newest
from datastates.commit.tiers import tier_of
from datastates.providers import from_pytree

SAVES = f"""{HEAD}
from hold import hold_until_exit

assert "torch" not in sys.modules
assert not jax._src.xla_bridge.backends_are_initialized()
with ds.Checkpointer(DIRECTORY, **OPTIONS) as ckpt:
    save(ckpt, 1)
assert not jax._src.xla_bridge.backends_are_initialized()
assert (jax.process_index(), jax.process_count()) == (RANK, SIZE)
with ds.Checkpointer(DIRECTORY.with_name("mesh"), **OPTIONS) as ckpt:
    tree = jax_meshes.tree((8,))
    ckpt.snapshot([from_pytree("s", tree)], step=7)
    total = float(jax.jit(lambda w: w.sum())(tree["rows"]))  # a collective of the training, meanwhile
    report("mesh", total=total)
    try:
        ckpt.snapshot([from_pytree("s", {{"one": jax_meshes.on_one_device()}})], step=8).wait_committed()
    except DatastatesError as error:
        report("one device", text=str(error))
all_are_here(client, "closed")
report("keys", keys=[key for key, _ in client.key_value_dir_get_bytes("datastates/")])
all_are_here(client, "looked")
try:
    ckpt = ds.Checkpointer(DIRECTORY, **(OPTIONS if RANK else {{**OPTIONS, "host_cache": "none"}}))
except DatastatesError as error:
    report("wrong setting", error=type(error).__name__, text=str(error))
all_are_here(client, "refused")
ckpt = ds.Checkpointer(DIRECTORY, rank_timeout=2, **OPTIONS)
if RANK == 1:
    client.blocking_key_value_get("rank 0 has given up", 60_000)
save(ckpt, 2)
if RANK == 0:
    client.key_value_set("rank 0 has given up", "yes")
restore(ckpt)
hold_until_exit("sync")
pending = ckpt.snapshot([state().fill(3)], step=3)
report("pending", committed=pending.committed)  # and the process ends, without closing anything
"""

RANK_1_IS_KILLED = f"""{HEAD}
from datastates._base import faults

restore_mesh((2, 4))
restore_folder()
ckpt = ds.Checkpointer(DIRECTORY, rank_timeout=3, **OPTIONS)
restore(ckpt)
if RANK == 1:
    faults.arm(*faults.parse("barrier.post=kill"))
save(ckpt, 4)
os._exit(0)  # the end of a process waits for all others
"""

RANK_0_IS_KILLED = f"""{HEAD}
from datastates._base import faults

ckpt = ds.Checkpointer(DIRECTORY, rank_timeout=3, **OPTIONS)
restore(ckpt)
if RANK == 0:
    faults.arm(*faults.parse("barrier.decide=kill"))
save(ckpt, 5)
time.sleep(60)  # JAX ends this process
"""


@dataclass(frozen=True)
class Runs:
    """What three runs in one directory have told, and which steps were committed after each.

    Attributes:
        root: The directory.
        mesh: A checkpoint of sharded arrays that the first run made beside.
    """

    root: Path
    mesh: Path
    saves: Reports
    rank_1_is_killed: Reports
    rank_0_is_killed: Reports
    committed: list[list[int]]
    statuses: list[list[int]]


@pytest.fixture(scope="module")
def runs(module_ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    root = tmp_path_factory.mktemp("jax") / "ckpts"
    folder = root.with_name("folder")
    folder.mkdir()
    for key, array in jax_meshes.FOLDER.items():
        save_file({key: array}, folder / f"{key}.safetensors")
    index = {"weight_map": {key: f"{key}.safetensors" for key in jax_meshes.FOLDER}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    told, committed, statuses = [], [], []
    for script, may_fail in ((SAVES, ()), (RANK_1_IS_KILLED, [1]), (RANK_0_IS_KILLED, [0, 1])):
        done = module_ranks(2, script, root, may_fail=may_fail, **RANKS)
        told.append(reports(done))
        committed.append(list(newest.committed(tier_of(root))))
        statuses.append([d.returncode for d in done])
    return Runs(root, root.with_name("mesh"), *told, committed, statuses)


@pytest.mark.long
def test_processes_commit_together_without_starting_jaxs_devices(runs: Runs) -> None:
    assert [told["save 1"]["error"] for told in runs.saves] == [None, None]
    # the numbers of the last rounds stay, for a rank that comes late
    assert [told["keys"]["keys"] for told in runs.saves] == [
        [f"datastates/{name}%2Frounds/value" for name in ("ckpts", "mesh")]
    ] * 2


def test_a_process_that_cannot_begin_tells_the_others(runs: Runs) -> None:
    first, second = (told["wrong setting"] for told in runs.saves)
    assert first["error"] == "SettingsError"
    assert second["error"] == "CommitError"
    assert first["text"] in second["text"]


def test_what_all_processes_hold_alike_is_saved_once(runs: Runs) -> None:
    assert np.array_equal(ds.load(runs.root, step=1)["alike"]["rates"], jax_meshes.RATES)


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


# --- arrays over the devices of both


def test_each_box_is_saved_by_one_process(runs: Runs) -> None:
    whole = sum(array.nbytes for array in jax_meshes.VALUES.values())
    assert [told["mesh"]["total"] for told in runs.saves] == [float(jax_meshes.VALUES["rows"].sum())] * 2
    written = sum(file.stat().st_size for file in runs.mesh.rglob("rank-*.pt"))
    assert whole < written < 1.05 * whole


def test_two_processes_restore_onto_another_mesh(runs: Runs) -> None:
    needed = [told["mesh"]["needed"] for told in runs.rank_1_is_killed]
    assert [told["mesh"]["wrong"] for told in runs.rank_1_is_killed] == [[], []]
    # each holds half of what is cut by its first axis, and all of the rest
    values = jax_meshes.VALUES
    halves, rest = values["rows"].nbytes, sum(values[key].nbytes for key in ("columns", "alike", "grid"))
    assert needed[0] == needed[1] < halves + rest
    for told in runs.rank_1_is_killed:
        read = told["mesh"]["read"] - told["mesh"]["shared"]
        assert told["mesh"]["needed"] <= read <= 1.05 * told["mesh"]["needed"]


def test_two_processes_read_only_their_boxes_of_a_folder_of_hugging_face(runs: Runs) -> None:
    half = sum(array.nbytes for array in jax_meshes.FOLDER.values()) // 2
    for told in runs.rank_1_is_killed:
        assert told["folder"]["wrong"] == []
        assert told["folder"]["needed"] == half
        assert told["folder"]["read"] <= 1.05 * half


@pytest.mark.parametrize("shape", [(8,), (4, 2), (1,)])
def test_one_process_restores_what_two_saved(runs: Runs, shape: tuple[int, ...]) -> None:
    provider = from_pytree("s", jax_meshes.described(shape))
    result = ds.restore([provider], runs.mesh, verify="digest")
    assert jax_meshes.wrong(provider.tree) == []
    assert result.read_nbytes <= 1.05 * result.needed_nbytes


def test_an_array_on_a_device_of_one_process_is_refused_by_name(runs: Runs) -> None:
    for told in runs.saves:
        assert "'one' is an array of JAX on the devices of process 0 alone" in told["one device"]["text"]


def test_they_load_as_whole_arrays(runs: Runs) -> None:
    loaded = ds.load(runs.mesh)["s"]
    assert {key: loaded[key].tobytes() for key in jax_meshes.VALUES} == {
        key: array.tobytes() for key, array in jax_meshes.VALUES.items()
    }
    assert loaded["step"] == 7
    assert all(isinstance(loaded[key], np.ndarray) for key in jax_meshes.VALUES)
