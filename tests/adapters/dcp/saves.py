"""Saves that are begun in one of two ways, while training goes on, and a planner by which they fail."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from datastates.adapters import dcp as ours
from datastates.adapters.dcp import DataStatesStorageWriter
from states import step

WAYS = ["thread", "snapshot"]
AT_ONCE = 20.0
"""Seconds within which a failed save must let training go on."""


class Save:
    """One save, begun in one of two ways."""

    def __init__(self, way: str, writer: DataStatesStorageWriter, state: dict[str, Any], path: Path, **options: Any):
        self.way = way
        self.snapshot: Any = None
        if way == "snapshot":
            self.snapshot = ours.async_save(state, path, storage_writer=writer, **options)
            return
        hold = writer.hold

        def held(state_dict: dict[str, Any]) -> Any:
            staged = hold(state_dict)
            self.snapshot = staged.snapshot
            return staged

        writer.hold = held  # type: ignore[method-assign]
        self.done = dcp.async_save(state, checkpoint_id=path, storage_writer=writer, **options)
        del writer.hold

    @property
    def captured(self) -> bool:
        return bool(self.snapshot.captured)

    @property
    def soon_captured(self) -> bool:
        """Whether the snapshot is captured, now or soon: the native core lets an optimizer go a moment earlier."""
        end = time.monotonic() + 5
        while not self.captured and time.monotonic() < end:
            time.sleep(0.002)
        return self.captured

    def wait(self) -> None:
        if self.way == "snapshot":
            self.snapshot.wait_committed()
        else:
            self.done.result()

    def error(self) -> BaseException:
        """The error of the save, without torch's wrapping."""
        with pytest.raises(BaseException) as raised:  # noqa: PT011 torch's is no Exception
            self.wait()
        if isinstance(raised.value, CheckpointException):
            ((found, _),) = raised.value.failures.values()
            return found  # type: ignore[no-any-return]
        return raised.value


def state_of(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": module.state_dict(), "optim": optimizer.state_dict(), "epoch": 3}


def stays(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """How long an optimizer's step takes, in seconds."""
    begin = time.monotonic()
    step(module, optimizer)
    return time.monotonic() - begin


class Failing(DefaultSavePlanner):
    """A planner that raises ``ValueError("my own reason")`` at one step."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def create_local_plan(self) -> Any:
        if self.where == "local":
            raise ValueError("my own reason")
        return super().create_local_plan()

    def create_global_plan(self, all_plans: Any) -> Any:
        if self.where == "global":
            raise ValueError("my own reason")
        return super().create_global_plan(all_plans)

    def finish_plan(self, new_plan: Any) -> Any:
        if self.where == "finish":
            raise ValueError("my own reason")
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: Any) -> Any:
        if self.where == "data":
            raise ValueError("my own reason")
        return super().resolve_data(write_item)
