"""Exports to safetensors: every element, from any layout, or an error and nothing that looks whole."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import datastates as ds
from datastates._base import faults
from datastates._base.faults import Fault
from datastates.cli import commands
from datastates.commit.tiers import tier_of
from datastates.container.file import open_container
from datastates.errors import CheckpointNotFoundError, CorruptError, StorageError
from datastates.exporting import copying
from datastates.providers import from_state_dict
from datastates.reading.stored import Stored

SHARDED = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
import datastates as ds
from datastates.providers import from_state_dict

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
whole = torch.arange(101 * 33.0).reshape(101, 33)
state = {f"cut{d}": distribute_tensor(whole, mesh, [Shard(d)]) for d in (0, 1)} | {"alike": whole}
ds.snapshot([from_state_dict("model", state)], sys.argv[1]).wait_committed()
dist.destroy_process_group()
"""
KILLED = "import json, sys, datastates as ds; ds.export(sys.argv[1], sys.argv[2], **json.loads(sys.argv[3]))"


def states() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    embedding = torch.randn(300, 7, dtype=torch.bfloat16)
    return {
        "embedding": embedding,
        "matrix": torch.randn(700, 300),
        "transposed": torch.randn(50, 60).t(),
        "gaps": torch.randn(40, 60)[:, ::2],
        "head": embedding,
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(3),
        "flags": torch.tensor([True, False, True]),
        "odd": torch.randn(1_000_003, dtype=torch.float64),
    }


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    state = states()
    ds.snapshot([from_state_dict("model", {**state, "epoch": 5})], tmp_path / "saved", step=7).wait_committed()
    return tmp_path / "saved", state


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of 64 KiB at most, so that most tensors lie in several."""
    monkeypatch.setattr(copying, "MOST_MEMORY", 3 * 64 << 10)


def holds(folder: Path, state: dict[str, torch.Tensor]) -> bool:
    read: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        read.update(load_file(file))
    return read.keys() == state.keys() and all(
        torch.equal(read[k], v) and read[k].dtype == v.dtype for k, v in state.items()
    )


@pytest.mark.parametrize("size", ["windows", "usual"])
def test_every_tensor_is_exported(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, size: str, request: pytest.FixtureRequest
) -> None:
    if size == "windows":
        request.getfixturevalue("small_windows")
    source, state = saved
    progress: list[tuple[int, int]] = []
    done = ds.export(source, tmp_path / "out", progress=lambda *now: progress.append(now))
    assert holds(tmp_path / "out", {k: v for k, v in state.items() if k != "head"})
    assert done.files == ("model.safetensors",)
    assert done.tied == {"head": "embedding"}
    assert done.objects == ("model",)
    assert (done.tensors, done.nbytes) == (8, (tmp_path / "out" / "model.safetensors").stat().st_size)
    assert sum(now for now, _ in progress) == done.nbytes
    assert {total for _, total in progress} == {done.nbytes}
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt", "head": "embedding"}
    assert os.listdir(tmp_path / "out") == ["model.safetensors"]
    assert sorted(os.listdir(tmp_path)) == ["out", "saved"]


def test_a_folder_of_shards_has_an_index(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    source, state = saved
    done = ds.export(source, tmp_path / "out", shard_size="1MB", keys=["model/[mo]*", "model/head"])
    assert holds(tmp_path / "out", {k: state[k] for k in ("matrix", "odd", "head")})
    assert len(done.files) == 2
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert {index["weight_map"][k] for k in ("matrix", "odd")} == set(done.files)


def test_one_file_of_one_step_and_renamed(tmp_path: Path) -> None:
    with ds.Checkpointer(tmp_path / "run") as checkpointer:
        for step in (1, 2):
            checkpointer.snapshot([from_state_dict("m", {"a.w": torch.full((5,), float(step))})], step=step)
    target = tmp_path / "weights.safetensors"
    done = ds.export(tmp_path / "run", target, step=1, rename={re.compile(r"^a\.(.)$"): r"layer.\1"})
    assert load_file(target)["layer.w"].tolist() == [1.0] * 5
    assert done.path == target
    container = next((tmp_path / "run").glob("*2/*.pt"))
    ds.export(container, tmp_path / "two.safetensors")
    assert load_file(tmp_path / "two.safetensors")["a.w"].tolist() == [2.0] * 5
    assert sorted(os.listdir(tmp_path)) == ["run", "two.safetensors", "weights.safetensors"]
    with pytest.raises(CheckpointNotFoundError):
        ds.export(tmp_path / "run", tmp_path / "three", step=3)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", torch.float32])
def test_floating_point_tensors_are_cast(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, dtype: Any, small_windows: None
) -> None:
    source, state = saved
    ds.export(source, tmp_path / "out", dtype=dtype)
    to = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype, torch.float32)
    cast = {k: v.to(to) if v.is_floating_point() else v for k, v in state.items() if k != "head"}
    assert holds(tmp_path / "out", cast)


def test_what_is_no_plain_float_is_not_cast(tmp_path: Path) -> None:
    state = {"w": torch.ones(4), "packed": torch.zeros(8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}
    ds.snapshot([from_state_dict("m", state)], tmp_path / "saved").wait_committed()
    with pytest.raises(ValueError, match="'m/packed' is of type float4_e2m1fn_x2, which torch's reader"):
        ds.export(tmp_path / "saved", tmp_path / "out", dtype="bf16")
    ds.export(tmp_path / "saved", tmp_path / "out", dtype="bf16", keys="m/w")


@pytest.mark.long
def test_the_parts_of_several_ranks_are_put_together(
    tmp_path: Path, ranks: Callable[..., Any], small_windows: None
) -> None:
    ranks(2, SHARDED, tmp_path / "saved")
    done = ds.export(tmp_path / "saved", tmp_path / "out")
    whole = torch.arange(101 * 33.0).reshape(101, 33)
    assert holds(tmp_path / "out", {"cut0": whole, "cut1": whole, "alike": whole})
    assert done.unproven == ()


def test_what_is_there_is_not_written_over(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    source, _ = saved
    full, empty, file = tmp_path / "full", tmp_path / "empty", tmp_path / "file.safetensors"
    full.mkdir()
    empty.mkdir()
    (full / "mine").write_text("mine")
    file.write_text("mine")
    for target in (full, file):
        with pytest.raises(FileExistsError, match=str(target)):
            ds.export(source, target)
    assert (full / "mine").read_text() == file.read_text() == "mine"
    ds.export(source, empty)
    assert os.listdir(empty) == ["model.safetensors"]


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"keys": "nothing*"}, "matches 'nothing"),
        ({"rename": {"x": "y"}}, "matches 'x'"),
        ({"rename": {re.compile("^.*(matrix|odd)$"): "one"}}, "would both be named 'one'"),
        ({"dtype": "int8"}, "dtype: int8"),
        ({"shard_size": "much"}, "shard_size: 'much'"),
    ],
)
def test_wrong_arguments_are_named(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, wrong: dict[str, Any], what: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(what)):
        ds.export(saved[0], tmp_path / "out", **wrong)
    with pytest.raises(ValueError, match="one file"):
        ds.export(saved[0], tmp_path / "out.safetensors", shard_size="1GB")
    assert os.listdir(tmp_path) == ["saved"]


@pytest.mark.parametrize("key", ["matrix", "odd"])
def test_a_flipped_byte_is_found(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, key: str) -> None:
    (container,) = saved[0].glob("*.pt")
    source = open_container(container)
    row = next(source.index.shards.row(i) for i in range(9) if source.index.shards.row(i).key == f"model/{key}")
    with container.open("r+b") as file:
        file.seek(int(source.data_offset[row.record]) + 5000)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(CorruptError, match=key):
        ds.export(saved[0], tmp_path / "out")
    assert os.listdir(tmp_path) == ["saved"]


def test_a_tensor_that_does_not_match_its_digest_is_not_published(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = Stored.digest  # a wrong digest stands for wrong elements
    monkeypatch.setattr(
        Stored, "digest", lambda self, key: (stored(self, key) or 0) ^ 1 if key == "model/odd" else stored(self, key)
    )
    with pytest.raises(CorruptError, match=r"'model/odd' .* does not match its digest"):
        ds.export(saved[0], tmp_path / "out")
    assert os.listdir(tmp_path) == ["saved"]


TARGETS: dict[str, dict[str, Any]] = {
    "out": {},
    "out.safetensors": {},
    "out.pt": {},
    "shards": {"shard_size": "500KB"},
}


@pytest.mark.long
@pytest.mark.parametrize("target", TARGETS)
def test_a_full_disk_leaves_nothing(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, small_windows: None, target: str
) -> None:
    points, how = ("write", "sync", "rename", "sync_directory"), {"keys": "model/[!o]*", **TARGETS[target]}
    for point in points:  # they only count
        faults.arm(Fault(f"store.{point}", "kill", nth=sys.maxsize))
    ds.export(saved[0], tmp_path / "counted" / "folder" / target, **how)
    counts = {point: faults._hits[f"store.{point}"] for point in points}
    shutil.rmtree(tmp_path / "counted")
    assert counts["write"] > 10
    for point in points:
        for nth in {
            1,
            counts[point] // 2 + 1,
            counts[point],
        }:  # the last write: the index, or the directory of an archive
            faults.clear()
            faults.arm(Fault(f"store.{point}", "fail", errno.ENOSPC, nth))
            with pytest.raises(StorageError) as caught:
                ds.export(saved[0], tmp_path / "new" / "folder" / target, **how)
            assert (caught.value.errno, caught.value.operation) == (errno.ENOSPC, point)
            assert str(caught.value.filename).startswith(str(tmp_path))
            assert os.listdir(tmp_path) == ["saved"]
    ds.export(saved[0], tmp_path / target, **how)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_may_refuse_direct_io_at_the_first_transfer(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    plain, refused = os.pwrite, []

    def pwrite(fd: int, data: Any, offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(offset)
            raise OSError(code, "refused")
        return plain(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    ds.export(saved[0], tmp_path / "out", direct_io=True)
    assert refused == [0]
    assert holds(tmp_path / "out", {k: v for k, v in saved[1].items() if k != "head"})

    def refuse(fd: int, *_: object) -> int:
        raise OSError(code, "refused")

    monkeypatch.setattr(os, "pwrite", refuse)  # through the page cache, too
    with pytest.raises(StorageError) as caught:
        ds.export(saved[0], tmp_path / "again", direct_io=True)
    assert caught.value.errno == code


@pytest.mark.parametrize("target", ["out", "out.pt"])
@pytest.mark.parametrize("as_folder", [False, True], ids=["file", "folder"])
def test_what_is_made_at_the_target_meanwhile_stays(
    saved: tuple[Path, dict[str, torch.Tensor]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    as_folder: bool,
) -> None:
    plain = faults.hit

    def hit(point: str, path: str) -> None:
        plain(point, path)
        if point == "store.rename":  # nothing is checked between this and the system call
            made = tmp_path / target / "other" if as_folder else tmp_path / target
            made.parent.mkdir(exist_ok=True)
            made.write_text("precious")

    monkeypatch.setattr(faults, "is_armed", lambda: True)
    monkeypatch.setattr(faults, "hit", hit)
    with pytest.raises(FileExistsError, match=re.escape(str(tmp_path / target))):
        ds.export(saved[0], tmp_path / target)
    assert (tmp_path / target / "other" if as_folder else tmp_path / target).read_text() == "precious"
    assert sorted(os.listdir(tmp_path)) == [target, "saved"]


@pytest.mark.long
@pytest.mark.parametrize("target", TARGETS)
def test_a_killed_export_leaves_nothing_that_looks_whole(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, ranks: Callable[..., Any], target: str
) -> None:
    (tmp_path / "in").mkdir()
    to = tmp_path / "in" / target
    for point in ("write", "sync", "rename"):
        nth = 2 if target == "shards" and point != "rename" else 1  # in the second file
        killed = {"alone": True, "may_fail": (0,), "DATASTATES_FAULTS": f"store.{point}=kill@{nth}"}
        (process,) = ranks(1, KILLED, saved[0], to, json.dumps(TARGETS[target]), **killed)
        assert process.returncode == -signal.SIGKILL
        assert not to.exists()
        assert len(tier_of(to.parent).debris(re.compile(re.escape(to.name)))) == 1
    ds.export(saved[0], to, **TARGETS[target])
    assert os.listdir(tmp_path / "in") == [target]


def test_an_export_that_is_killed_after_its_commit_is_whole(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, ranks: Callable[..., Any]
) -> None:
    killed = {"alone": True, "may_fail": (0,), "DATASTATES_FAULTS": "store.unlock=kill"}
    (process,) = ranks(1, KILLED, saved[0], tmp_path / "out", "{}", **killed)
    assert process.returncode == -signal.SIGKILL
    assert load_file(tmp_path / "out" / "model.safetensors")["scalar"] == 3


def test_a_failed_export_leaves_parents_in_which_something_was_made(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy(*_: object) -> None:
        (tmp_path / "new" / "theirs").touch()
        raise StorageError(errno.ENOSPC, "write", "there")

    monkeypatch.setattr(copying.Copier, "copy", copy)
    with pytest.raises(StorageError):
        ds.export(saved[0], tmp_path / "new" / "folder" / "out.pt")
    assert os.listdir(tmp_path / "new") == ["theirs"]


def test_targets_that_cannot_be_made_are_named(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    source, _ = saved
    (container,) = source.glob("*.pt")
    before = container.read_bytes()
    (tmp_path / "folder.pt").mkdir()
    (tmp_path / "dangling.pt").symlink_to(tmp_path / "nothing")
    for target in (source, container, tmp_path / "folder.pt", tmp_path / "dangling.pt"):
        with pytest.raises(FileExistsError, match=re.escape(str(target))):
            ds.export(source, target)
    with pytest.raises(StorageError, match=re.escape(str(container))) as caught:
        ds.export(source, container / "out.pt")
    assert caught.value.errno == errno.ENOTDIR
    for target in ("out.pt", "out"):  # as on a file system that is read-only
        faults.arm(Fault("store.mkdir", "fail", errno.EROFS))
        with pytest.raises(StorageError, match=re.escape(str(tmp_path))) as caught:
            ds.export(source, tmp_path / "new" / target)
        assert caught.value.errno == errno.EROFS
    assert container.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["dangling.pt", "folder.pt", "saved"]


def test_the_command_line(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out"
    wanted = ["--keys", "model/ma*", "--rename", "re:^(m)a=\\1A", "--dtype", "bf16", "--json"]
    assert commands.main(["export", str(saved[0]), str(target), *wanted]) == 0
    assert json.loads(capsys.readouterr().out)["tensors"] == 1
    assert load_file(target / "model.safetensors")["mAtrix"].dtype == torch.bfloat16
    assert commands.main(["export", str(saved[0]), str(target)]) == 2
    assert str(target) in capsys.readouterr().err
    assert commands.main(["export", str(saved[0]), str(tmp_path / "more"), "--rename", "re:(=x"]) == 2
    assert "no regular expression" in capsys.readouterr().err
    assert commands.main(["export", str(saved[0]), str(tmp_path / "more"), "--rename", "x"]) == 2
    assert "is not OLD=NEW" in capsys.readouterr().err
    assert commands.main(["export", str(tmp_path / "no"), str(tmp_path / "more")]) == 2
    assert commands.main(["export", str(saved[0]), str(tmp_path / "all")]) == 0
    out = capsys.readouterr().out
    assert "head is the same tensor as embedding" in out
    assert "model: what is no tensor in it is left out" in out
    assert "8 tensors" in out
