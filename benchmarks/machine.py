"""Describe the machine, the file system and the versions of packages."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

import datastates
from measure import cores

PACKAGES = (
    *("torch", "numpy", "safetensors", "torchsnapshot", "torch-checkpointing", "jax", "orbax-checkpoint"),
    *("obstore", "s3fs", "s3torchconnector", "localbucket"),
)


def describe(directory: Path) -> dict[str, Any]:
    """Describe the machine, and the storage that a directory is on."""
    found: dict[str, Any] = {
        "cpu": _cpu(),
        "cores": cores(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "storage": _storage(directory),
        "python": platform.python_version(),
        "datastates": datastates.__version__,
        "packages": {name: version for name in PACKAGES if (version := _version(name)) is not None},
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["gpus"] = torch.cuda.device_count()
        found["gpu_memory"] = torch.cuda.get_device_properties(0).total_memory
        found["cuda"] = torch.version.cuda
        driver = Path("/proc/driver/nvidia/version")
        found["driver"] = _first(r"Kernel Module.*?\s([\d.]+)", driver.read_text()) if driver.exists() else "unknown"
    return found


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    return _first(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text()) or platform.machine()


def _first(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text)
    return match[1].strip() if match else None


def _storage(directory: Path) -> str:
    """The file system and device of a directory."""
    device = os.stat(directory).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[2] == wanted:
            kind, source = fields[fields.index("-") + 1 :][:2]
            return f"{kind} on {source}"
    return "unknown"
