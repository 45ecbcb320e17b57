"""Folders as a Trainer writes them, and drains of them."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import torch

from datastates.draining import folder
from datastates.draining.copies import Copies
from datastates.draining.folder_drain import FolderDrains
from datastates.files.settings import FileSettings
from datastates.files.torch_files import TorchFiles
from datastates.kept import TierSettings
from datastates.storage import Location

FAR = "far://bucket/run"


def make(root: Path, step: int, salt: int = 0, name: str = "checkpoint-{}") -> Path:
    """A folder as a Trainer writes it: one file of ours, one of torch, and small ones."""
    path = root / name.format(step)
    path.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(step + salt)
    files = TorchFiles(FileSettings(host_cache="2MiB", block="1MiB"))
    (path / "optimizer.pt").unlink(missing_ok=True)
    files.write("optimizer", {"w": torch.randn(3000)}, path / "optimizer.pt", lambda *_: False).wait_committed()
    files.close()
    torch.save({"m": torch.randn(50_000)}, path / "model.bin")
    (path / "sub").mkdir(exist_ok=True)
    (path / "sub" / "empty").write_bytes(b"")
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step, "salt": salt}))
    return path


def contents(path: Path) -> dict[str, bytes]:
    found = {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}
    found.pop(folder.RECORD, None)
    return found


def drains(*tiers: TierSettings | str) -> FolderDrains:
    return FolderDrains(
        [one if isinstance(one, TierSettings) else TierSettings(one) for one in tiers], lambda: False, nullcontext
    )


def drain(path: Path, *tiers: TierSettings | str) -> None:
    made = drains(*tiers)
    made.add(Location(path))
    made.close()


def names(place: str = FAR) -> list[str]:
    return sorted(copy.name for copy in Copies(Location.of(place)).every().values())
