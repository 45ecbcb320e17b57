"""Measure how fast weights come from a file onto a GPU, in place and into new tensors, next to other loaders."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import datastates as ds
import page_cache
import raw
from datastates.providers import from_state_dict
from measure import Plan, Result, Sample, interleave, stopwatch
from peers.loaders import LOADERS, Weights

_FEW_ROUNDS = 1
"""Rounds of loaders that are slow where the file is in memory, so that the suite ends in time."""
_SLOW = ("Run:ai streamer", "safetensors", "torch.load mmap")
_PINNED = 256 << 20
IN_PLACE = "datastates in place"


def run(directory: Path, plan: Plan, *, cold: bool, tiny: bool) -> Result:
    """Measure all loaders: from a file on a disk that is not cached, or from ``directory`` in memory."""
    shape = (256, 384) if tiny else (4096, 6144)
    count = 24 if tiny else 80 if cold else 240
    weights = {f"layer.{i}.weight": torch.randn(shape, device="cuda").to(torch.bfloat16) for i in range(count)}
    nbytes = sum(t.nbytes for t in weights.values())
    files = _save(directory, weights)
    live = {name: torch.empty_like(t) for name, t in weights.items()}
    prepare = page_cache.drop if cold else lambda _: None
    result = Result(
        parameters={"bytes": nbytes, "tensors": count},
        settings={name: loader.settings for name, loader in LOADERS.items()},
    )
    result.settings[IN_PLACE] = "Checkpointer.restore(), defaults; all checksums verified"
    limit, result.settings["raw"] = _raw_disk(directory, nbytes) if cold else _pinned_copy(nbytes)
    with ds.Checkpointer(directory / "own") as checkpointer:
        providers = [from_state_dict("weights", live)]

        def load(name: str) -> Sample:
            loader = LOADERS[name]
            return _timed(partial(loader.load, files[loader.reads]), weights, partial(prepare, files[loader.reads]))

        def restore() -> Sample:
            for tensor in live.values():
                tensor.zero_()

            def once() -> Weights:
                checkpointer.restore(providers)
                return live

            return _timed(once, weights, partial(prepare, files["datastates"]))

        actions: dict[str, Callable[[], Sample]] = {"raw": limit, IN_PLACE: restore}
        actions |= {name: partial(load, name) for name in LOADERS}
        interleave(result, actions, plan, rounds={} if cold else dict.fromkeys(_SLOW, _FEW_ROUNDS))
    return result


def _save(directory: Path, weights: Weights) -> dict[str, Path]:
    """Save the weights as a checkpoint, and as a file of safetensors."""
    from safetensors.torch import save_file

    own = directory / "own" / "step-00000000"
    own.parent.mkdir()
    ds.snapshot([from_state_dict("weights", dict(weights))], own).wait_committed()
    file = directory / "weights.safetensors"
    save_file(dict(weights), file)
    return {"datastates": own, "safetensors": file}


def _timed(load: Callable[[], Weights], expected: Weights, prepare: Callable[[], None]) -> Sample:
    """Load with no memory of the device kept from an earlier load; compare every element."""
    prepare()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    with stopwatch() as sample:
        found = load()
        torch.cuda.synchronize()
    if found.keys() != expected.keys() or not all(torch.equal(found[name], t) for name, t in expected.items()):
        raise AssertionError("the load did not bring the values back")
    return sample


def _pinned_copy(nbytes: int) -> tuple[Callable[[], Sample], str]:
    """The limit where the file is in memory: copies of as many bytes out of a page-locked buffer."""
    host = torch.empty(min(nbytes, _PINNED), dtype=torch.uint8, pin_memory=True)
    device = torch.empty(nbytes, dtype=torch.uint8, device="cuda")

    def copy() -> Sample:
        torch.cuda.synchronize()
        with stopwatch() as sample:
            for at in range(0, nbytes, len(host)):
                part = device[at : at + len(host)]
                part.copy_(host[: len(part)], non_blocking=True)
            torch.cuda.synchronize()
        return sample

    return copy, f"{len(host) >> 20} MiB of page-locked memory, copied again and again"


def _raw_disk(directory: Path, nbytes: int) -> tuple[Callable[[], Sample], str]:
    """The limit where the file is on a disk: the raw program."""
    file = raw.RawFiles((directory / "raw",), nbytes)
    mode = raw.best_mode(file, "read")
    file.run("write", mode)

    def read() -> Sample:
        page_cache.drop(directory / "raw")
        return file.run("read", mode)

    return read, raw.in_words(mode)
