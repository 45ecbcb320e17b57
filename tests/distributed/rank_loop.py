"""One rank of a training loop over a split state, for tests that kill, starve and confuse ranks.

Arguments: directories (one, or several joined by ``:``, each in turn), then words. ``STEP`` saves that step.
``STEP/WHAT`` saves it while something is wrong on one rank, the one that CONFUSED names. ``restore`` restores the
newest checkpoint; ``restore/FAULT`` does so with a fault armed on that rank. The loop prints one JSON line for each
word, and one for closing.

WHAT is a fault point (``write=fail:28``, see datastates/_base/faults.py), or one of these: ``shape``, ``overlap``,
``gap`` (the rank holds another part than the others think), ``step`` (it saves another step), ``late`` (it comes after
LATE seconds), ``shards``, ``serialize`` (a provider raises in that method), ``die`` (a provider kills the rank while it
serializes), ``torn`` (the rank's state changes while it is captured).

The environment has RANK and WORLD_SIZE, and may have LAYOUT (rows, columns, ranges, replicas), SHAPES, and OPTIONS of
the checkpointer. All ranks begin together, so that a short ``rank_timeout`` need not cover the start of a process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).parent))

from hold import held
from split_state import Split

import datastates as ds
from datastates.executor.executor import arm_faults
from datastates.providers import PickledObjectProvider, RngProvider
from datastates.state.provider import StateProvider
from datastates.state.shards import Shard, object_shard

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
SHAPES = {"w": (96, 40), "b": (33,), "odd": (7, 3, 5)}
IS_CONFUSED = os.environ.get("CONFUSED") == str(RANK)
OPTIONS = {"host_cache": "8MiB", "block": "1MiB", "on_error": "warn", **json.loads(os.environ.get("OPTIONS", "{}"))}
if RANKS > 1:
    OPTIONS |= {"rank": RANK, "world_size": RANKS}


class Broken(StateProvider):
    """A provider that raises or kills its process, in a method that is chosen."""

    def __init__(self, where: str) -> None:
        """Raise in ``"shards"`` or in ``"serialize"``, or ``"die"`` while serializing in the background."""
        super().__init__("broken")
        self._where = where

    def shards(self) -> Sequence[Shard]:
        """One object."""
        if self._where == "shards":
            raise LookupError("no shards today")
        return [object_shard(lazy=True)]

    def serialize(self, shard: Shard) -> bytes:
        """Break."""
        if self._where == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        raise LookupError("cannot be serialized")


def begin_together(directory: Path) -> None:
    """Wait until all ranks are here."""
    folder = directory.with_name(f"{directory.name}-present-{os.environ.get('MASTER_PORT', '')}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / str(RANK)).touch()
    while len(os.listdir(folder)) < RANKS:
        time.sleep(0.01)


def make(wrong: str = "") -> Split:
    """This rank's part of the state, or a part other than the other ranks think."""
    shapes = {k: tuple(v) for k, v in json.loads(os.environ["SHAPES"]).items()} if "SHAPES" in os.environ else SHAPES
    layout = getattr(Split, os.environ.get("LAYOUT", "rows"))
    if wrong == "shape":
        shapes = {**shapes, "w": (96, 44)}
    state = layout("model", shapes, RANK - 1 if wrong == "overlap" else RANK, RANKS)
    if wrong == "gap":
        state.drop("w")
    return state


def save(ckpt: ds.Checkpointer, step: int, state: Split, rest: list[StateProvider], wrong: str) -> str:
    """Save a step; returns the checkpoint's name."""
    providers: list[StateProvider] = [state.fill(step), *rest]
    if "=" in wrong:
        arm_faults(wrong)
    elif wrong in ("shape", "overlap", "gap"):
        providers[0] = make(wrong).fill(step)
    elif wrong == "step":
        step += 100
    elif wrong == "late":
        time.sleep(float(os.environ["LATE"]))
    elif wrong in ("shards", "serialize", "die"):
        providers.append(Broken(wrong))
    elif wrong == "torn":
        large = Split("large", {"x": ((4 << 20,), "box", ((0,), (4 << 20,)))})  # larger than the cache
        providers.append(large)
        with held():
            snap = ckpt.snapshot(providers, step=step)
            large.fill(step)
        snap.wait_committed()
    elif wrong:
        raise ValueError(wrong)
    snap = ckpt.snapshot(providers, step=step)
    snap.wait_committed()
    return snap.path.name


def tell(word: str, call: Callable[[], object]) -> None:
    """Call a function, and print its result, if that is a mapping, or its error."""
    begin = time.monotonic()
    try:
        found = call()
        said = found if isinstance(found, dict) else {}
    except Exception as error:
        said = {"error": type(error).__name__, "text": str(error)}
    print(json.dumps({"word": word, **said, "seconds": time.monotonic() - begin}), flush=True)


def run(directory: Path, words: list[str]) -> None:
    """Do what the words say."""
    state, loop = make(), {"epoch": -1}
    rest = [PickledObjectProvider("loop", lambda: dict(loop), loop.update), RngProvider()]
    begin_together(directory)
    ckpt = ds.Checkpointer(directory, **OPTIONS)

    def do(word: str) -> dict[str, object]:
        if word.startswith("restore"):
            if IS_CONFUSED and "/" in word:
                arm_faults(word.partition("/")[2])
            found = ckpt.restore([state, *rest])
            if found is None:
                return {"step": None, "epoch": loop["epoch"]}
            wrong = state.wrong(found.step)
            return {"step": found.step, "epoch": loop["epoch"], "wrong": wrong, "missing": found.missing_keys}
        step, _, wrong = word.partition("/")
        loop["epoch"] = int(step)
        return {"committed": save(ckpt, int(step), state, rest, wrong if IS_CONFUSED else "")}

    for word in words:
        tell(word, partial(do, word))
    tell("close", ckpt.close)


if __name__ == "__main__":
    for directory in sys.argv[1].split(":"):
        run(Path(directory), sys.argv[2:])
