"""The compared systems behind one protocol: datastates itself, and what a user would pick instead."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import TracebackType
from typing import Any

from measure import Result
from peers.base import Pending, System
from tables import system_of

__all__ = ["Pending", "Roster", "System", "class_of", "is_peer"]

_CLASSES = {
    "datastates": "datastates_peer:Datastates",
    "datastates with pwrite": "datastates_peer:DatastatesWithPwrite",
    "datastates incremental": "datastates_peer:DatastatesIncremental",
    "datastates with device_cache": "datastates_peer:DatastatesWithDeviceCache",
    "datastates through DCP": "dcp_adapter_peer:DatastatesThroughDcp",
    "datastates from a bucket": "bucket_peers:Datastates",
    "DCP with s3fs": "bucket_peers:DcpWithS3fs",
    "DCP with s3torchconnector": "bucket_peers:DcpWithS3torchconnector",
    "torch.save/load": "torch_save_peer:TorchSave",
    "torch.save/load mmap": "torch_save_peer:TorchSaveMmap",
    "safetensors": "safetensors_peer:Safetensors",
    "DCP": "dcp_peer:Dcp",
    "DCP async": "dcp_peer:DcpAsync",
    "Orbax": "orbax_peer:Orbax",
    "TorchSnapshot": "torchsnapshot_peer:TorchSnapshot",
    "torch_checkpointing": "torch_checkpointing_peer:TorchCheckpointing",
    "torch_checkpointing async": "torch_checkpointing_peer:TorchCheckpointingAsync",
}


def class_of(name: str) -> type[System]:
    """The class of a system; raises what importing the framework behind it raises."""
    module, _, cls = _CLASSES[name].partition(":")
    found: type[System] = getattr(importlib.import_module(f"peers.{module}"), cls)
    return found


def is_peer(row: str) -> bool:
    """Whether a row is of a system other than datastates."""
    name = system_of(row)
    return name in _CLASSES and not name.startswith("datastates")


class Roster:
    """Opens systems at first use, each in a folder of its own, and closes them at the end."""

    def __init__(self, directory: Path, result: Result, **options: Any) -> None:
        """Remember where files and results go.

        Args:
            directory: Where the systems' folders go.
            result: Where the systems' settings go, and the errors of systems that cannot be closed.
            **options: Settings of datastates other than the defaults.
        """
        self._directory = directory
        self._result = result
        self._options = options
        self._open: dict[str, System] = {}

    def __getitem__(self, name: str) -> System:
        """The system of that name; raises what its import or construction raises."""
        if name not in self._open:
            folder = self._directory / re.sub(r"\W+", "-", name)
            folder.mkdir(parents=True, exist_ok=True)
            options = self._options if name.startswith("datastates") else {}
            system = class_of(name)(folder, **options)
            self._open[name] = system
            self._result.settings[name] = system.settings
        return self._open[name]

    def __enter__(self) -> Roster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, system in self._open.items():
            try:
                system.close()
            except Exception as failure:  # the samples of the others stand
                self._result.fail(name, failure)
