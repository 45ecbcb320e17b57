"""Ranks that save together: all commit or none, with one reason on all, and the next snapshot works."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import short
import torch

import datastates as ds
from datastates.cli import commands
from datastates.commit import fence, manifest, names, newest
from datastates.commit.catalog import Catalog
from datastates.commit.claims import key_hash, object_hash
from datastates.commit.tiers import tier_of
from datastates.container.file import Container, open_container
from datastates.container.table import Row
from datastates.errors import TornSnapshotError

HERE = Path(__file__).parent
LOOP = HERE / "rank_loop.py"
SHAPES = {"model/w": (96, 40), "model/b": (33,), "model/odd": (7, 3, 5)}
SECONDS = 2.0
"""The ``rank_timeout`` of tests in which ranks wait for another one in vain."""


def containers(path: Path) -> list[Container]:
    return [open_container(path / entry.file) for entry in manifest.open(path).containers]


def model_rows(one: Container) -> list[Row]:
    table = one.index.shards
    return [row for row in table.rows(range(len(table))) if row.key.startswith("model/")]


def options(**changed: object) -> str:
    return json.dumps(changed)


def assert_tidy(root: Path, *steps: int) -> None:
    """Check that a directory holds these checkpoints and nothing else, and that every byte is as it was written."""
    found = [path for path in sorted(root.iterdir()) if path.name != fence.FOLDER]
    assert [path.name for path in found] == [names.step_name(step) for step in steps]
    for path in found:
        assert commands.main(["verify", str(path)]) == 0


@pytest.mark.by_hand
@pytest.mark.parametrize(
    ("count", "layout"), short.first([(3, "rows"), (1, "rows"), (2, "columns"), (4, "ranges"), (3, "replicas")])
)
def test_every_element_is_in_one_container(count: int, layout: str, ranks: Any, reports: Any, tmp_path: Path) -> None:
    root = tmp_path / "run"
    told = reports(ranks(count, LOOP, root, 1, 2, LAYOUT=layout))
    assert [rank["2"]["committed"] for rank in told] == ["step-00000002"] * count
    assert_tidy(root, 1, 2)
    path = newest.committed(tier_of(root))[2]
    found = containers(path)
    held = {key: Counter[int]() for key in SHAPES}
    holders: dict[str, set[int]] = {key: set() for key in SHAPES}
    for rank, one in enumerate(found):
        identity = {"step": 2, "rank": rank, "world_size": count, "attempt": manifest.open(path).attempt}
        assert one.index.identity == identity
        rows = model_rows(one)
        # for torch.load each rank's file lists all tensors, whichever rank wrote the elements
        assert [row.key for row in rows] == list(SHAPES)
        for row in rows:
            assert row.global_shape == SHAPES[row.key]
            for begin, length in zip(*row.part.runs(), strict=True):
                held[row.key].update(range(int(begin), int(begin + length)))
                holders[row.key].add(rank)
    for key, shape in SHAPES.items():
        assert held[key] == Counter(range(int(np.prod(shape))))
    if count > 1:
        data = (path / "catalog.bin").read_bytes()
        entry = manifest.open(path).catalog
        assert entry is not None
        catalog = Catalog(lambda offset, length: data[offset : offset + length], entry.nbytes, entry.head_crc32)
        assert catalog.containers == count
        for key, shape in SHAPES.items():
            tensor = catalog.find(key_hash(key))
            assert tensor is not None
            assert catalog.holders(tensor, 0, int(np.prod(shape))) == sorted(holders[key])
        for rank in range(count):
            assert catalog.find(object_hash(f"rng@{rank:05d}")) is not None
            assert catalog.container(rank) == (found[rank].nbytes, found[rank].index_crc)


@pytest.mark.long
def test_replicas_share_the_work(ranks: Any, tmp_path: Path) -> None:
    shapes = {f"layer {i}": [100 + i] for i in range(40)}
    ranks(4, LOOP, tmp_path / "run", 1, LAYOUT="replicas", SHAPES=json.dumps(shapes))
    found = containers(tmp_path / "run" / "step-00000001")
    nbytes = [4 * sum(row.part.numel for row in model_rows(one)) for one in found]
    assert sum(nbytes) == 4 * sum(n for (n,) in shapes.values())
    assert max(nbytes) - min(nbytes) <= 4 * 139


@pytest.mark.long
def test_each_file_is_one_that_torch_loads(ranks: Any, tmp_path: Path) -> None:
    ranks(3, LOOP, tmp_path / "run", 7, LAYOUT="columns")
    loaded = [torch.load(file) for file in sorted((tmp_path / "run" / "step-00000007").glob("*.pt"))]
    assert [sorted(each) for each in loaded] == [["loop", "model", f"rng@{rank:05d}"] for rank in range(3)]
    assert [each["loop"] for each in loaded] == [{"epoch": 7}] * 3
    whole = torch.cat([each["model"]["w"] for each in loaded], dim=1)
    start = sum(b"w") * 1000 + 7 * 7
    assert torch.equal(whole, torch.arange(start, start + 96 * 40, dtype=torch.float32).view(96, 40))


WRONG = {
    "shape": "'model/w' is float32 of shape (96, 40) on rank 0 but float32 of shape (96, 44) on rank 2",
    "overlap": "'model/b': ranks 1 and 2 both hold elements 9 to 18; 'model/odd': ranks 1 and 2 both hold elements "
    "30 to 60; 'model/w': ranks 1 and 2 both hold elements 960 to 1920; state that ranks hold alike belongs into a "
    "ReplicatedProvider, what differs by rank needs a key of its own or a provider whose class has per_rank = True",
    "gap": "'model/w': nobody holds elements 1920 to 2880 of 3840",
    "step": "the ranks took a snapshot of different steps: step {} on ranks 0-1, 3, step {}00 on rank 2. Their calls "
    "of snapshot() are paired in order: after one that a rank has left out, make a new Checkpointer on all ranks",
    "shards": "rank 2: LookupError: no shards today",
    "serialize": "rank 2: LookupError: cannot be serialized",
    "torn": f"rank 2: TornSnapshotError: {TornSnapshotError(['large/x'])}",
    "write=fail:28": "rank 2: StorageError: write failed on {}/rank-00002.pt: No space left on device (errno 28)",
    "allocate=fail:122": "rank 2: StorageError: allocate failed on {}/rank-00002.pt: Disk quota exceeded (errno 122)",
    "sync=fail:5": "rank 2: StorageError: sync failed on {}/rank-00002.pt: Input/output error (errno 5)",
    "store.mkdir=fail:13": "rank 2: StorageError: mkdir {}: Permission denied [errno 13]",
    "store.sync_directory=fail:5": "rank 2: StorageError: sync_directory {}: Input/output error [errno 5]",
}
OF_THE_COORDINATOR = {
    "serialize": "rank 0: LookupError: cannot be serialized",
    "write=fail:28": "rank 0: StorageError: write failed on {}/rank-00000.pt: No space left on device (errno 28)",
    "store.write=fail:28": "write {}/catalog.bin: No space left on device [errno 28]",
    "store.write=fail:28@2": "write {}/manifest.json: No space left on device [errno 28]",
    "store.rename=fail:5": "rename {}: Input/output error [errno 5]",
    "store.unlock=fail:5": "unlock {}/.lock: Input/output error [errno 5]",
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("confused", "expected"), short.first([(2, WRONG), (0, OF_THE_COORDINATOR)], rest=pytest.mark.by_hand)
)
def test_one_rank_fails_all_and_the_next_snapshot_works(
    confused: int, expected: dict[str, str], ranks: Any, reports: Any, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    words, steps = ["1"], [1]
    for i, wrong in enumerate(expected):
        words += [f"{2 * i + 2}/{wrong}", f"{2 * i + 3}"]
        steps.append(2 * i + 3)
    told = reports(ranks(4, LOOP, root, *words, CONFUSED=str(confused), OPTIONS=options(rank_timeout=20)))
    for word in words:
        step, _, wrong = word.partition("/")
        said = [rank[word] for rank in told]
        if not wrong:
            assert [each["committed"] for each in said] == [f"step-{int(step):08d}"] * 4
            continue
        assert max(each["seconds"] for each in said) < 15
        told_to_others = {each["text"] for rank, each in enumerate(said) if rank != confused}
        assert {each["error"] for rank, each in enumerate(said) if rank != confused} == {"CommitError"}
        place = re.escape(f"{root}/step-{int(step):08d}") + "(.partial-[0-9a-f]{8})?"
        step_there = step if wrong != "step" else f"{int(step) + 100}"
        pattern = re.escape(expected[wrong])
        pattern = pattern.replace(r"step\ \{\}00", f"step {step_there}").replace(r"step\ \{\}", f"step {step}")
        (text,) = told_to_others
        whole = text
        text = re.sub(r"; the file needs .*?(?= \[errno|$)", "", text)
        # a full disk, in the words of the file that found no room
        assert (text != whole) == wrong.startswith(("write=fail:28", "allocate=fail:122"))
        assert re.fullmatch(pattern.replace(r"\{\}", place), text)
        # the rank itself gets its own error, or the agreed one where only the comparison shows it
        assert said[confused]["text"].split("; the file needs")[0] in whole
    assert_tidy(root, *steps)


@pytest.mark.by_hand
def test_a_straggler_is_named_and_comes_too_late(ranks: Any, reports: Any, tmp_path: Path) -> None:
    """It misses two snapshots, and its late votes for them do not count. All ranks commit the next one."""
    root = tmp_path / "run"
    variables = {"CONFUSED": "1", "LATE": str(2 * SECONDS), "OPTIONS": options(rank_timeout=SECONDS)}
    told = reports(ranks(3, LOOP, root, 1, "2/late", 3, 4, **variables))
    for number, word in enumerate(["2/late", "3"]):
        for rank in told:
            assert rank[word]["error"] == "RanksMissingError"
            expected = f"checkpointer/snapshot/{number + 1}: no answer from rank 1 within {0.8 * SECONDS:.3g} s"
            assert rank[word]["text"] == expected
    for rank in (0, 2):
        assert told[rank]["2/late"]["seconds"] < SECONDS + 0.5
    assert [rank["4"]["committed"] for rank in told] == ["step-00000004"] * 3
    assert_tidy(root, 1, 4)


@pytest.mark.long
@pytest.mark.parametrize(
    ("loss", "text"),
    [
        ("os.unlink(file)", "is missing: "),
        ("os.truncate(file, 100)", "has 100 bytes, not the "),
    ],
)
def test_a_container_lost_after_its_vote_is_missed(
    loss: str, text: str, ranks: Any, prelude: str, reports: Any, tmp_path: Path
) -> None:
    """The coordinator notices the loss, though it has all votes by then."""
    script = f"""{prelude}
from datastates.commit import ballot

write_catalog = ballot._write_catalog


def lose_one(votes, pending):
    if votes[0].step == 2:
        file = pending.directory / votes[1].files[0].name
        {loss}
    return write_catalog(votes, pending)


ballot._write_catalog = lose_one
with ds.Checkpointer(directory, **OPTIONS) as ckpt:
    for step in (1, 2, 3):
        tell(str(step), ckpt.snapshot([state.fill(step)], step=step).wait_committed)
"""
    root = tmp_path / "run"
    for rank in reports(ranks(3, script, root)):
        assert rank["2"]["error"] == "CommitError"
        assert rank["2"]["text"].startswith(f"the container of rank 1 {text}")
        assert "error" not in rank["1"] | rank["3"]
    assert_tidy(root, 1, 3)


@pytest.mark.long
def test_replicas_that_each_leave_a_tensor_to_the_other(ranks: Any, prelude: str, reports: Any, tmp_path: Path) -> None:
    """The ranks see different keys, so that each thinks that the other writes the tensor that both have."""
    script = f"""{prelude}
with ds.Checkpointer(directory, **OPTIONS) as ckpt:
    shapes = {{"a": (8,), "b": (4,)}} if RANK == 0 else {{"b": (4,)}}
    state = Split.replicas("model", shapes, RANK, RANKS)
    tell("leave", ckpt.snapshot([state], step=1).wait_committed)
    tell("next", ckpt.snapshot([Split.replicas("model", {{"b": (4,)}}, RANK, RANKS)], step=2).wait_committed)
"""
    for rank in reports(ranks(2, script, tmp_path / "run")):
        found = (
            "'model/b': nobody holds elements 0 to 4 of 4: ranks 0-1 left them to another's copy, which is not there; "
        )
        assert rank["leave"]["text"].startswith(found)
        assert "per_rank = True" in rank["leave"]["text"]
        assert "error" not in rank["next"]
    assert_tidy(tmp_path / "run", 2)


AT_ITS_END = """
import os, sys
import numpy as np
import datastates as ds
from datastates.providers import from_state_dict
sys.path.insert(0, sys.argv[2])
from hold import hold_until_exit

rank = int(os.environ["RANK"])
hold_until_exit("sync")
ckpt = ds.Checkpointer(sys.argv[1], host_cache="2MiB", block="1MiB", rank=rank, world_size=2)
ckpt.snapshot([from_state_dict(f"own{rank}", {"a": np.full(1000, rank)})], step=1)
# the script ends here: the interpreter's end waits for the commit
"""


@pytest.mark.long
def test_ranks_whose_scripts_have_ended_commit_all_the_same(ranks: Any, tmp_path: Path) -> None:
    ranks(2, AT_ITS_END, tmp_path / "checkpoints", HERE.parent / "support")
    with ds.open(tmp_path / "checkpoints") as checkpoint:
        assert checkpoint.step == 1
        assert [int(checkpoint[f"own{rank}/a"][0]) for rank in (0, 1)] == [0, 1]
