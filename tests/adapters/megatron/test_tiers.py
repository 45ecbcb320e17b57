"""Megatron's folders go on to a bucket once Megatron has completed them, and are loaded from there on a fresh disk."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from datastates.cli.commands import main
from datastates.draining.copies import Copies
from datastates.storage import Location

SAVE = """
    root, bucket = Path(sys.argv[1]), sys.argv[2]
    layout = Layout(tp=2)
    strategy = Ours.save(host_cache="2MiB", block="1MiB", tiers={"path": bucket, "keep_last": 2})
    queue = AsyncCallsQueue()
    for step in (5, 10, 15):
        where = root / f"iter_{step:07d}"
        if step == 10:
            queue.schedule_async_request(save(state(layout, step), where, strategy, async_sharded_save=True))
            queue.maybe_finalize_async_calls(blocking=True)
        else:
            save(state(layout, step), where, strategy)
        together(lambda: (root / "latest_checkpointed_iteration.txt").write_text(str(step)))
    strategy.close()
"""
LOAD = """
    root = Path(sys.argv[1])
    step = int((root / "latest_checkpointed_iteration.txt").read_text())
    assert step == 15
    for reader in (Stock.load(), Ours.load()):
        loaded_as(Layout(tp=2), step, root / f"iter_{step:07d}", reader)
        loaded_as(Layout(dp=2), step, root / f"iter_{step:07d}", reader)
"""


@pytest.mark.by_hand
def test_a_fresh_disk_loads_what_the_bucket_has(run: Any, tmp_path: Path, bucket: str) -> None:
    root = tmp_path / "run"
    run(2, SAVE, root, bucket)
    assert sorted(one.name for one in Copies(Location(bucket)).every().values()) == ["iter_0000010", "iter_0000015"]
    shutil.rmtree(root)
    assert main(["fetch", bucket, str(root)]) == 0
    run(2, LOAD, root)


@pytest.mark.long
def test_the_script_of_megatron_names_the_bucket_once(run: Any, tmp_path: Path, bucket: str) -> None:
    run(
        2,
        """
    from types import ModuleType
    module = ModuleType("checkpointing")
    for name in ("get_default_save_sharded_strategy", "get_default_load_sharded_strategy"):
        setattr(module, name, None)
    install(module, tiers=sys.argv[2])
    strategy = module.get_default_save_sharded_strategy("torch_dist", 1)
    save(state(Layout(tp=2), 5), Path(sys.argv[1]) / "iter_0000005", strategy)
    strategy.close()
    """,
        tmp_path / "run",
        bucket,
    )
    assert [one.name for one in Copies(Location(bucket)).every().values()] == ["iter_0000005"]
