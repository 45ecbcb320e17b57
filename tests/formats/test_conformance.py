"""What every format must do: list, describe, read, export, verify and compare, and refuse what is damaged by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, Case, holder, weights
from safetensors.torch import load_file, save_file

import datastates as ds
from datastates.cli import commands, output
from datastates.errors import CorruptError, DatastatesError, FormatError, StorageError
from datastates.formats import recognise
from datastates.formats.seen import Seen
from datastates.storage import Location

SMALL: dict[str, Any] = {"host_cache": "8MiB", "block": "1MiB"}


LONG = {"trainer", "lightning"}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.long] if name in LONG else []) for name in CASES],
)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def made(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "checkpoint"
    case.make(path)
    return path


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    to = tmp_path / "copy"
    shutil.copytree(made, to) if made.is_dir() else shutil.copy(made, to)
    return to


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def command(*arguments: object) -> tuple[int, str]:
        status = commands.main([str(a) for a in arguments])
        said = capsys.readouterr()
        return status, said.out + said.err

    return command


def same(a: Any, b: torch.Tensor) -> bool:
    return isinstance(a, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)


def leaves(value: Any, prefix: str = "") -> dict[str, Any]:
    """The tensors of a nested value, by their names joined by slashes."""
    if not isinstance(value, dict):
        return {prefix: value}
    found: dict[str, Any] = {}
    for key, item in value.items():
        found |= leaves(item, f"{prefix}/{key}" if prefix else str(key))
    return found


class TestFormat:
    def test_it_is_recognised_by_what_it_holds(self, case: Case, made: Path) -> None:
        found = recognise.recognise(Seen(Location(made)))
        assert found is not None
        assert case.name == found.NAME

    def test_its_tensors_are_listed(self, case: Case, made: Path) -> None:
        with ds.open(made, **SMALL) as opened:
            assert set(opened) >= {case.keys(name) for name in weights()}
            assert len(opened) == len(list(opened))
            assert "nothing" not in opened
            with pytest.raises(KeyError):
                opened["nothing"]

    @pytest.mark.parametrize("name", weights())
    def test_each_tensor_is_read(self, case: Case, made: Path, name: str) -> None:
        with ds.open(made, **SMALL) as opened:
            assert case.keys(name) in opened
            assert same(opened[case.keys(name)], weights()[name])

    def test_parts_of_each_tensor_are_read(self, case: Case, made: Path) -> None:
        with ds.open(made, **SMALL) as opened:
            for name, tensor in weights().items():
                assert opened.shape(case.keys(name)) == tuple(tensor.shape)
                for index in [..., *([slice(1, 3), -1] if tensor.ndim and len(tensor) else [])]:
                    assert same(opened.part(case.keys(name), index), tensor[index]), name

    def test_all_of_it_is_loaded(self, case: Case, made: Path) -> None:
        found = leaves(ds.load(made, **SMALL))
        for name, tensor in weights().items():
            assert same(found[case.keys(name)], tensor), name

    def test_it_is_exported_by_bytes(self, case: Case, made: Path, tmp_path: Path) -> None:
        keys = [case.keys(name) for name in weights()]
        alone = len({key.partition("/")[0] for key in keys}) == 1
        done = ds.export(made, tmp_path / "out.safetensors", keys=keys, **SMALL)
        written = load_file(tmp_path / "out.safetensors")
        for name, tensor in weights().items():
            key = case.keys(name)
            assert same(written[key.partition("/")[2] or key if alone else key], tensor), name
        assert done.tensors == len(keys)
        assert bool(done.unproven) != case.checked

    def test_what_was_exported_is_exported_again_alike(self, case: Case, made: Path, tmp_path: Path) -> None:
        keys = [case.keys(name) for name in weights()]
        ds.export(made, tmp_path / "one.safetensors", keys=keys, **SMALL)
        ds.export(tmp_path / "one.safetensors", tmp_path / "two.safetensors", **SMALL)
        assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "two.safetensors").read_bytes()

    def test_inspect_says_what_it_is(self, case: Case, made: Path, run: Callable[..., tuple[int, str]]) -> None:
        status, text = run("inspect", made, "--json")
        told = json.loads(text)
        assert (status, told["format"]) == (0, case.name)
        found = {t["key"]: (t["dtype"], tuple(t["shape"])) for t in told["tensors"]}
        for name, tensor in weights().items():
            assert found[case.keys(name)] == (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        status, text = run("inspect", made, "--keys", case.keys("matrix"))
        assert status == 0
        assert "700x300" in text

    def test_verify_reads_all_of_it(self, case: Case, made: Path, run: Callable[..., tuple[int, str]]) -> None:
        status, text = run("verify", made)
        assert status == 0, text
        assert ("checksum" in text) or case.name == "a checkpoint of datastates"
        assert json.loads(run("verify", made, "--json")[1])["format"] == case.name

    def test_verify_finds_a_flipped_byte_where_it_can(
        self, case: Case, copy: Path, run: Callable[..., tuple[int, str]]
    ) -> None:
        file, at = holder(copy)
        data = bytearray(file.read_bytes())
        data[at] ^= 1
        file.write_bytes(data)
        status, text = run("verify", copy)
        key = case.keys("matrix")
        if not case.checked:
            assert (status, "no checksums" in text or "records have a checksum" in text) == (0, True)
            return
        assert status == 1
        assert key in text
        with ds.open(copy, **SMALL) as opened, pytest.raises(CorruptError, match="matrix"):
            opened[key]
        with pytest.raises(CorruptError, match="matrix"):
            ds.load(copy, **SMALL)
        with pytest.raises(CorruptError, match="matrix"):
            ds.export(copy, copy.parent / "out", keys=key, **SMALL)

    def test_diff_compares_what_it_holds(
        self, case: Case, made: Path, copy: Path, run: Callable[..., tuple[int, str]]
    ) -> None:
        assert run("diff", made, copy)[0] == 0
        keys = [case.keys(name) for name in weights()]
        changed = dict(zip(keys, weights().values(), strict=True))
        changed[case.keys("matrix")][5, 5] += 1
        save_file(changed, copy.parent / "changed.safetensors")
        status, text = run("diff", made, copy.parent / "changed.safetensors")
        assert status == 1
        assert f"{case.keys('matrix')} differs" in text
        assert "1 of other contents, 0 of another type" in text

    @pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 1.0])
    def test_a_truncated_file_is_refused_by_its_path(self, case: Case, copy: Path, share: float) -> None:
        file, middle = holder(copy)
        with file.open("r+b") as opened:
            opened.truncate(int(middle * share))
        for look in (lambda: dict(ds.open(copy, **SMALL)), lambda: ds.load(copy, **SMALL)):
            with pytest.raises(DatastatesError) as refused:
                look()
            assert isinstance(refused.value, FormatError) or not share
            assert file.name in str(refused.value)

    def test_a_missing_file_is_named(self, case: Case, copy: Path) -> None:
        if not case.folder:
            return  # then there is nothing to open
        file, _ = holder(copy)
        file.unlink()
        with pytest.raises((StorageError, FormatError), match=file.name):
            dict(ds.open(copy, **SMALL))

    def test_ls_lists_it_among_others(self, case: Case, made: Path, run: Callable[..., tuple[int, str]]) -> None:
        status, text = run("ls", made.parent)
        assert status == 0
        assert case.name in text
        told = json.loads(run("ls", made.parent, "--json")[1])
        (one,) = told["others"]
        files = [file for file in (made.rglob("*") if case.folder else [made]) if file.is_file()]
        assert (one["name"], one["format"], one["step"]) == (made.name, case.name, case.step)
        assert one["bytes"] == sum(file.stat().st_size for file in files)
        assert datetime.fromisoformat(one["changed"]).timestamp() == max(int(f.stat().st_mtime) for f in files)
        if case.name == "a checkpoint of datastates":
            return  # it has not the name of a step, and is described as a checkpoint when it is named itself
        status, text = run("ls", made)
        step = "-" if case.step is None else str(case.step)
        size = output.as_size(one["bytes"])
        row = [step, one["changed"], *size.split(), made.name, *case.name.split()]
        assert (status, [line.split() for line in text.splitlines()[1:]]) == (0, [row])

    def test_export_says_what_is_proven(
        self, case: Case, made: Path, tmp_path: Path, run: Callable[..., tuple[int, str]]
    ) -> None:
        keys = [word for name in weights() for word in ("--keys", case.keys(name))]
        status, text = run("export", made, tmp_path / "out", *keys)
        assert status == 0
        if case.name != "a checkpoint of datastates":
            what = (
                "every tensor matches its checksum" if case.checked else "5 of 6 tensors have no checksum to match"
            )  # the other is empty
            assert f"{made} is {case.name}: {what}" in text
