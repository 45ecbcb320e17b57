"""A host is lost for good, with its processes, its memory and its disk: the next run restores what was copied."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from per_host_job import RANKS, names

pytest.importorskip("torch.distributed")
LOOP = """
import os, signal, socket, sys
from pathlib import Path
import torch, torch.distributed as dist
import datastates as ds
from datastates.draining import peers
from datastates.providers import PickledObjectProvider
from datastates.ranks import link
sys.path[:0] = [sys.argv[1], os.path.join(os.path.dirname(sys.argv[1]), "support")]
from in_ranks import wait_for
from split_state import Split

SHAPES = {"w": (9600, 40), "b": (33,), "odd": (7, 3, 5)}
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
hosts, dead, where, *steps = sys.argv[3:]
socket.gethostname = lambda: hosts[rank]
link._MESSAGE, peers.SILENCE = 100_000, 2
loop = {"of": rank}
state = [Split.rows("model", SHAPES, rank, ranks), PickledObjectProvider("loop", loop.copy, loop.update)]
ckpt = ds.Checkpointer(
    os.path.join(sys.argv[2], hosts[rank], "run"),
    per_host=True, peers=1, keep_last=1, rank_timeout=5, on_error="warn",
)
found = ckpt.restore(state)
assert found is None or (not state[0].wrong(found.step) and loop == {"of": rank})
print("restored", found and found.step, flush=True)
dist.barrier()

def kill():
    Path(sys.argv[2], f"killed-{rank}").touch()
    os.kill(os.getpid(), signal.SIGKILL)

def armed():
    send, receive, agree = link.Link._send, link.Link._receive, ckpt._engine.world.agree
    sent, heard = [], []
    def dying_send(self, message):
        sent.append(None)
        if where == f"send {len(sent)}":
            kill()
        return send(self, message)
    def dying_receive(self, message):
        heard.append(None)
        if where == f"receive {len(heard)}":
            kill()
        return receive(self, message)
    def dying_agree(name, *rest):
        if name.endswith("/copied") and where == "before it tells":
            kill()
        told = agree(name, *rest)
        if name.endswith("/copied") and where == "as it has heard":
            kill()
        return told
    link.Link._send, link.Link._receive, ckpt._engine.world.agree = dying_send, dying_receive, dying_agree

for step in map(int, steps):
    if step == 3 and hosts[rank] in dead:
        armed()
    taken = ckpt.snapshot([state[0].fill(step), *state[1:]], step=step)
    ckpt.wait()
    try:
        ckpt.wait_drained(30)
    except ds.errors.SnapshotTimeoutError as error:
        print(error, flush=True)
    print(step, taken.report.places[1:], flush=True)
if not dead:
    dist.barrier()  # rank 0 hosts the store
elif rank == 0:
    wait_for(lambda: any(Path(sys.argv[2]).glob("killed-*")), "the end of a rank")
sys.stdout.flush()
os._exit(0)
"""


def lose(host: str, where: str, ranks: Any, tmp_path: Path) -> int:
    """Lose a host while it copies step 3; returns the step that the next run restores, with a new host for it."""
    words = (Path(__file__).parent, tmp_path)
    dead = [2, 3] if host == "b" else [0, 1]
    done = ranks(RANKS, LOOP, *words, "aabb", host, where, 1, 2, 3, may_fail=[*range(RANKS)])
    said = [one.stdout.split("\n") for one in done]
    assert all(one[:3] == ["restored None", "1 ('peers',)", "2 ('peers',)"] for one in said), done
    assert any(done[rank].returncode == -signal.SIGKILL for rank in dead)
    shutil.rmtree(tmp_path / host)
    new = "aabb".replace(host, "c")
    done = ranks(RANKS, LOOP, *words, new, "", "", 4)
    told = {one.stdout.split("\n")[0] for one in done}
    assert [one.stdout.split("\n")[1] for one in done] == ["4 ('peers',)"] * RANKS
    for one in {*new}:
        assert names(tmp_path / one / "run") == ["step-00000004"]
    (restored,) = told
    return int(restored.split()[1])


@pytest.mark.by_hand
def test_a_host_is_lost_while_it_copies(ranks: Any, tmp_path: Path) -> None:
    assert lose("b", "send 3", ranks, tmp_path) == 2


PLACES = [
    ("send 1", 2),
    ("send 5", 2),
    ("receive 1", 2),
    ("receive 4", 2),
    ("before it tells", 3),
    ("as it has heard", 3),
]


@pytest.mark.parametrize(
    "host", [pytest.param("a", marks=pytest.mark.by_hand), pytest.param("b", marks=pytest.mark.by_hand)]
)
@pytest.mark.parametrize(("where", "restored"), PLACES)
def test_a_host_is_lost_anywhere(host: str, where: str, restored: int, ranks: Any, tmp_path: Path) -> None:
    found = lose(host, where, ranks, tmp_path)
    assert found in (2, 3)
    assert found == restored or where.startswith("receive")  # what was sent may have come
