"""The command line on checkpoints of several ranks: each tensor once, with its parts; and the catalog verified."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
from command import inspected, run
from elastic_state import reseal, save, sign
from split_state import logical

from datastates.commit import manifest

SHAPES = {"w": (96, 40), "b": (33,), "scalar": ()}


@pytest.fixture
def path(threads: Any, tmp_path: Path) -> Path:
    save(threads, tmp_path / "c", "rows", 3, shapes=SHAPES)
    return tmp_path / "c"


def test_inspect_shows_each_tensor_once_with_its_parts(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary, listed = inspected(capsys, path)
    columns, *rows = [line.split() for line in listed]
    assert summary[0].startswith(f"{path}  step 3, 3 ranks, ")
    assert summary[3].split()[:2] == ["model", "3"]
    assert columns == ["KEY", "TYPE", "SHAPE", "RANK", "PART", "SIZE", "OFFSET", "DIGEST"]
    digest = f"{zlib.crc32(logical('w', (96, 40), step=3).tobytes()):08x}"
    assert rows[0] == ["model/w", "float32", "96x40", "15.0", "KiB", digest]
    assert [row[:-1] for row in rows[1:4]] == [
        [str(r), f"[{32 * r}:{32 * r + 32},", "0:40]", "5.0", "KiB"] for r in range(3)
    ]
    assert [row[0] for row in rows if row[0].startswith("model")] == ["model/w", "model/b", "model/scalar"]
    assert [row[1] for row in rows[9:10]] == ["all"]  # one of the replicas has it
    assert sorted(row[0] for row in rows if "object" in row) == ["loop"] * 3 + [f"own@{r:05d}" for r in range(3)]


def test_inspect_tells_programs_the_same(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run(capsys, "inspect", path, "--json")[1])
    assert [one["rank"] for one in found["containers"]] == [0, 1, 2]
    tensors = {t["key"]: t for t in found["tensors"]}
    assert set(tensors) == {f"model/{key}" for key in SHAPES}
    w = tensors["model/w"]
    assert (w["dtype"], w["kind"], w["shape"], w["bytes"]) == ("float32", "numpy", [96, 40], 96 * 40 * 4)
    whole = b""
    for part in w["parts"]:
        whole += Path(part["file"]).read_bytes()[part["offset"] :][: part["bytes"]]
        assert part["box"] == [32 * part["rank"], 0]
    assert whole == logical("w", (96, 40), step=3).tobytes()
    assert w["digest"] == f"{zlib.crc32(whole):08x}"
    assert len(tensors["model/scalar"]["parts"]) == 1


def test_inspect_of_one_container_shows_its_parts(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, output = run(capsys, "inspect", path / "rank-00001.pt")
    assert status == 0
    assert "step 3, rank 1 of 3" in output
    assert "32x40 of 96x40" in output


def test_verify_counts_and_checks_the_catalog(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, output = run(capsys, "verify", path, "--json")
    files = [file for file in path.iterdir() if file.name != manifest.FILE]
    assert (status, json.loads(output)["bytes"]) == (0, sum(file.stat().st_size for file in files))
    file = path / "catalog.bin"
    good = file.read_bytes()
    for at in range(0, len(good), 7):
        file.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        status, output = run(capsys, "verify", path)
        assert (status, output) == (1, f"the catalog at byte {at} in {file} is not what the containers make of it\n")
    for bad in (b"", good[:-1], good + b"\0"):
        file.write_bytes(bad)
        assert run(capsys, "verify", path)[0] == 1


def test_verify_compares_the_catalog_with_the_manifest(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = manifest.open(path)
    assert made.catalog is not None
    entry = made.catalog.model_copy(update={"head_crc32": made.catalog.head_crc32 ^ 1})
    (path / manifest.FILE).write_bytes(manifest.encode(made.model_copy(update={"catalog": entry})))
    status, output = run(capsys, "verify", path)
    assert (status, output) == (1, f"the catalog in {path / 'catalog.bin'} is not the one that the manifest names\n")


def test_verify_compares_the_digests_with_the_data(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reseal(path, 1, "model/w")
    status, output = run(capsys, "verify", path)
    assert status == 1
    assert output == f"model/w in {path / 'rank-00001.pt'} its digest contradicts its data\n"


def test_ls_counts_the_ranks(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path.rename(path.with_name("step-00000003"))
    assert run(capsys, "ls", path.parent)[1].splitlines()[1].split()[2] == "3"
    sign(path.with_name("step-00000003"))
    assert run(capsys, "verify", path.parent)[0] == 0


@pytest.mark.parametrize("lost", ["cut", "missing", "another"])
def test_verify_names_what_it_cannot_open_and_goes_on(
    lost: str, path: Path, threads: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, third = (path / f"rank-{rank:05}.pt" for rank in range(3))
    if lost == "cut":
        first.write_bytes(first.read_bytes()[:-100])
    elif lost == "missing":
        first.unlink()
    else:
        save(threads, path.with_name("d"), "rows", 3, shapes=SHAPES)
        first.write_bytes((path.with_name("d") / first.name).read_bytes())
    arrays = json.loads(run(capsys, "inspect", second, "--json")[1])["containers"][0]["arrays"]
    with second.open("r+b") as file:
        file.seek(next(a["offset"] for a in arrays if a["key"] == "model/w"))
        file.write(b"wrong")
    third.write_bytes(b"")
    (path / "catalog.bin").unlink()
    status, output = run(capsys, "verify", path)
    lines = output.splitlines()
    assert status == 1
    assert [line.partition(" in ")[0] for line in lines] == ["the container", "model/w", "the container", "the catalog"]
    for line, file in zip(lines, (first, second, third, path / "catalog.bin"), strict=True):
        assert str(file) in line
    status, output = run(capsys, "verify", path, "--json")
    found = json.loads(output)
    assert (status, found["ok"]) == (1, False)
    assert [(p["key"], p["file"]) for p in found["problems"]] == [
        ("the container", str(first)),
        ("model/w", str(second)),
        ("the container", str(third)),
        ("the catalog", str(path / "catalog.bin")),
    ]
    assert all(p["problem"] for p in found["problems"])
