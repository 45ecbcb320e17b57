"""An interrupt inside ``snapshot()`` reaches its caller; it is not reported again at exit as an unseen failure."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

import datastates as ds
from datastates._base.workers import Work
from datastates.providers import HostTensorProvider
from datastates.saving import snapshot as snapshots


@pytest.mark.parametrize("when", ["before it is put", "while it runs", "after its thread has ended it"])
def test_an_interrupted_call_is_told_by_its_interrupt(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with ds.Checkpointer(tmp_path, host_cache="4MiB", block="1MiB") as ckpt:
        engine = ckpt._engine
        put = engine._pool.put

        def interrupted(work: Work) -> None:
            if when != "before it is put":
                put(work)
                if when == "after its thread has ended it":
                    engine._pool.wait_done()
            raise KeyboardInterrupt

        monkeypatch.setattr(engine._pool, "put", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ckpt.snapshot([HostTensorProvider("model", {"a": np.ones(1000)})], step=1)
        monkeypatch.setattr(engine._pool, "put", put)
        ckpt.snapshot([HostTensorProvider("model", {"a": np.ones(1000)})], step=2).wait_committed()
    caplog.clear()  # the traceback of the interrupt is logged
    with caplog.at_level(logging.ERROR, "datastates"):
        snapshots._tell_at_exit()
    assert caplog.messages == []
    assert engine.pending() == []
