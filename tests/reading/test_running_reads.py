"""Reads are held from their begin to their end, whoever drops them meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import datastates as ds
from datastates.config import IoSettings
from datastates.container.file import open_container
from datastates.executor.make import make_executor
from datastates.providers import HostTensorProvider
from datastates.reading import reads
from datastates.reading.reads import Reads
from datastates.state import arrays


def test_reads_that_begin_meanwhile_forget_no_others(tmp_path: Path) -> None:
    ds.snapshot([HostTensorProvider("s", {"t": np.arange(1000)})], tmp_path / "c").wait_committed()
    source = open_container(tmp_path / "c" / "rank-00000.pt")
    executor = make_executor(IoSettings(host_cache="4MiB", block="1MiB"))

    def queued() -> tuple[Reads, Any]:
        made, array = Reads(in_full=True), np.empty(1000, np.int64)
        made.add_memory(source, int(source.data_offset[0]), arrays.memory(array))
        return made, array

    class Between:
        extent_for = executor.extent_for

        def submit_read(self, *given: Any) -> Any:
            queued()[0].run(executor)
            return executor.submit_read(*given)

    one, array = queued()
    between: Any = Between()
    one.start(between)
    assert one in reads._running
    one.finish()
    assert reads._running == set()
    assert (array == np.arange(1000)).all()
    executor.close()
