"""A rank that took no part in one checkpoint captures the next one while the others still write the first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from short import first

HELD = """
from datastates.commit.ballot import Ballot

commit = Ballot.commit

def held(self, *arguments):
    while RANK == 0 and self.step == 1 and not (directory.parent / "gated").exists():
        time.sleep(0.01)
    return commit(self, *arguments)

Ballot.commit = held
"""


@pytest.mark.parametrize("failure", first(["shards", "write=fail:28", "torn"]))
def test_its_gate_does_not_wait_for_their_storage(
    failure: str, ranks: Any, prelude: str, reports: Any, tmp_path: Path
) -> None:
    script = f"""{prelude}
{HELD}
from datastates.executor.jobs import WriteJob

ckpt = ds.Checkpointer(directory, **OPTIONS, max_in_flight=1)
torn, wrong = WriteJob.torn, {failure!r} if RANK == 1 else ""
if wrong == "torn":
    WriteJob.torn = lambda self: [0]
elif "=" in wrong:
    arm_faults(wrong)
try:
    first = ckpt.snapshot([state.fill(1), *([Broken(wrong)] if wrong == "shards" else [])], step=1)
    if wrong:
        ckpt.wait()
except LookupError:
    pass
WriteJob.torn = torn
begin_together(directory.with_name("first"))
second = ckpt.snapshot([state.fill(2)], step=2)  # on rank 0 it waits for the first
if RANK == 1:
    ckpt.gate()
    (directory.parent / "gated").touch()
second.wait_committed()
tell("end", lambda: {{"steps": ckpt.steps()}})
ckpt.close()
"""
    told = reports(ranks(2, script, tmp_path / "run", timeout=30))
    assert [rank["end"]["steps"] for rank in told] == [[2], [2]]
