"""Whoever looks at a folder as soon as accelerate has saved it sees what accelerate alone leaves there."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from by_path import module_at
from hold import held

from datastates import _native
from datastates.files import looks
from datastates.files.transaction import Transaction

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")
safe_open = safetensors.safe_open  # as a program has it: imported before anything is saved


HERE = Path(__file__).parent
pytestmark = pytest.mark.filterwarnings("ignore")  # from accelerate itself
LIST = "import os, sys; print(sorted(os.listdir(sys.argv[1])))"


def names(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def written(folder: Path, write: Callable[[Path], object]) -> list[str]:
    """The files once something more has been written beside them."""
    write(folder)
    return names(folder)


def keys(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as opened:
        return sorted(opened.keys())


def renamed(folder: Path) -> list[str]:
    os.rename(folder, folder.parent / "best")
    return names(folder.parent)


def linked(folder: Path) -> list[str]:
    (folder.parent / "link").symlink_to(folder.name)
    with looks.unwatched():
        return names(folder.parent / "link")


def again(training: ModuleType, folder: Path) -> int:
    other = training.Loop(folder.parent, lazy=False)
    other.accelerator.load_state(folder)
    return int(other.step)


TENSORS = {"t": torch.ones(2)}
LOOKS: dict[str, Callable[[Path], object]] = {
    "listdir": lambda folder: sorted(os.listdir(folder)),
    "listdir of the parent": lambda folder: sorted(os.listdir(folder.parent)),
    "exists": lambda folder: folder.exists(),
    "size": lambda folder: os.path.getsize(folder / "model.safetensors"),
    "rglob": lambda folder: names(folder.parent),
    "load_file": lambda folder: sorted(safetensors.load_file(folder / "model.safetensors")),
    "safe_open": lambda folder: keys(folder / "model.safetensors"),
    "torch.load": lambda folder: list(torch.load(folder / "optimizer.bin", weights_only=True)),
    "copytree": lambda folder: names(Path(shutil.copytree(folder, folder.parent.parent / f"{folder.name}-copy"))),
    "move": renamed,
    "link": linked,
    "program": lambda folder: subprocess.check_output([sys.executable, "-c", LIST, str(folder)]),
    "write_text": lambda folder: written(folder, lambda f: (f / "notes.txt").write_text("x")),
    "a hidden file": lambda folder: written(folder, lambda f: (f / ".notes").write_text("x")),
    "torch.save": lambda folder: written(folder, lambda f: torch.save(1, f / "more.pt")),
    "save_file": lambda folder: written(folder, lambda f: safetensors.save_file(TENSORS, f / "more.safetensors")),
    "mkdir": lambda folder: written(folder, lambda f: (f / "more").mkdir()),
    "a folder that is there": lambda folder: written(folder, lambda f: f.mkdir(exist_ok=True)),
    "chdir": lambda folder: written(folder, lambda f: (os.chdir(f), Path("here").touch())),
    "rmtree": lambda folder: (shutil.rmtree(folder), names(folder.parent)),
}


@pytest.fixture(scope="module")
def training() -> ModuleType:
    return module_at(HERE / "training.py")


@pytest.fixture(scope="module")
def loops(training: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Two loops in the same state, one without this package."""
    made = {}
    for name in ("stock", "ours"):
        made[name] = training.Loop(tmp_path_factory.mktemp(name), lazy=name == "ours")
        made[name].accelerator.project_configuration.automatic_checkpoint_naming = False
        made[name].train(2)
    yield made
    made["ours"].accelerator.end_training()


@pytest.fixture
def see(loops: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Save both ways, and compare what somebody sees then."""

    def compare(look: Callable[[Path], object]) -> None:
        seen = []
        monkeypatch.chdir(tmp_path)
        for name, loop in loops.items():
            folder = tmp_path / name / "run" / "step"
            folder.parent.mkdir(parents=True)
            with held("sync", until=(Transaction, "see")) if name == "ours" else contextlib.nullcontext():
                loop.accelerator.save_state(folder)
                seen.append(look(folder))
        assert seen[0] == seen[1]

    return compare


@pytest.mark.parametrize("look", LOOKS)
def test_who_looks_sees_what_accelerate_leaves(look: str, see: Callable[..., None]) -> None:
    see(LOOKS[look])


def test_other_objects_of_the_program_find_it(training: ModuleType, loops: dict[str, Any], tmp_path: Path) -> None:
    loop, folder = loops["ours"], tmp_path / "one"
    with held("sync", until=(Transaction, "see")):
        loop.accelerator.save_state(folder)
        loop.accelerator.save({"a": 1}, folder / "more.pt")
    assert {"more.pt", "model.safetensors"} <= set(names(folder))
    with held("sync", until=(Transaction, "see")):
        loop.accelerator.save_state(tmp_path / "two")
        loop.accelerator.save_model(loop.net, tmp_path / "two")
    with held("sync", until=(Transaction, "see")):
        loop.accelerator.save_state(tmp_path / "three")
        assert again(training, tmp_path / "three") == 2


def test_nobody_else_waits(loops: dict[str, Any], tmp_path: Path) -> None:
    loop = loops["ours"]
    with held("sync"):
        loop.accelerator.save_state(tmp_path / "step")
        loop.forward()
        loop.accelerator.save({"a": 1}, tmp_path / "elsewhere.pt")
        torch.load(tmp_path / "elsewhere.pt")
        (tmp_path / "log.txt").write_text("x")
        with looks.unwatched():
            assert not (tmp_path / "step").exists()
        _native.clear_faults()
    loop.checkpoints.wait()


def test_of_two_saves_to_one_folder_the_later_stays(loops: dict[str, Any], tmp_path: Path) -> None:
    found = []
    for name, loop in loops.items():
        folder = tmp_path / name
        with held("sync", until=(Transaction, "see")) if name == "ours" else contextlib.nullcontext():
            loop.accelerator.save_state(folder)
            loop.forward()
            loop.update()
            loop.accelerator.save_state(folder)
            weights = safetensors.load_file(folder / "model.safetensors")
        assert torch.equal(weights["inner.weight"], loop.net.inner.weight)
        found.append(names(folder))
    assert found[0] == found[1]


@pytest.mark.parametrize("limit", [1, 2, None])
def test_a_loop_that_saves_and_then_counts_finds_what_accelerate_keeps(
    limit: int | None, training: ModuleType, tmp_path: Path
) -> None:
    seen = []
    for name in ("stock", "ours"):
        loop = training.Loop(tmp_path / name, lazy=name == "ours", total_limit=limit)
        root = tmp_path / name / "checkpoints"
        with held("sync", until=(Transaction, "see")) if name == "ours" else contextlib.nullcontext():
            for number in range(2 if limit is None else 1):
                loop.accelerator.project_configuration.iteration = number
                loop.accelerator.save_state()
            found = [(root / "checkpoint_0").exists()]
        for number in range(2, 6):
            loop.accelerator.project_configuration.iteration = number
            loop.accelerator.save_state()
        found += [(root / f"checkpoint_{number}" / "optimizer.bin").exists() for number in range(6)]
        seen.append((found, names(root)))
        loop.accelerator.end_training()
    assert seen[0] == seen[1]


@pytest.mark.parametrize("look", ["listdir", "rglob", "rmtree"])
def test_who_looks_at_the_project_sees_what_accelerate_leaves(look: str, training: ModuleType, tmp_path: Path) -> None:
    looking = {"listdir": os.listdir, "rglob": names, "rmtree": shutil.rmtree}[look]
    seen = []
    for name in ("stock", "ours"):
        loop = training.Loop(tmp_path / name, lazy=name == "ours")
        with held("sync", until=(Transaction, "see")) if name == "ours" else contextlib.nullcontext():
            loop.accelerator.save_state()
            seen.append(looking(tmp_path / name))
        loop.accelerator.end_training()
    assert seen[0] == seen[1]
