"""Time the call that saves: this build beside other builds and torch_checkpointing, each in a process of its own.

``python benchmarks/call_cost.py --build old=WHEEL_OR_FOLDER`` runs all systems in turn, so that a drift of the machine
affects all alike. With a GPU the state is a GPT's, in 788 tensors of 6.7 GB; without one, the same in small.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

Sample = dict[str, float]
INSTALLED = "this build"
PEER = "torch_checkpointing async"
CASES = (
    "GPT, from_stateful, idle",
    "GPT, from_stateful, busy",
    "GPT, functions, idle",
    "GPT, functions, busy",
    "one tensor of 64 elements",
    "one tensor of 0.27 GB",
)
"""``functions``: ``from_state_dict`` of the methods ``state_dict``. A peer that has no such choice takes both alike."""
LOOP = "loop"
PERIOD = 30
"""Training iterations for each checkpoint of a loop."""
_WARM_UP = 2
"""Calls of each case that are shown by themselves: the first one plans, the second one finds what that left behind."""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--build", action="append", default=[], metavar="NAME=PATH", help="another build: a wheel, or a folder with it"
    )
    parser.add_argument("--no-peer", action="store_true", help="leave torch_checkpointing out")
    parser.add_argument("--rounds", type=int, default=10, metavar="N", help="calls of each case (default 10)")
    parser.add_argument("--loops", type=int, default=0, metavar="N", help="training loops of each system (default 0)")
    parser.add_argument("--seconds", type=float, default=float("inf"), metavar="S", help="end after this long")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="only the cases whose names hold one of these texts")
    parser.add_argument("--directory", type=Path, default=Path("build"), metavar="DIR", help="where files go")
    parser.add_argument("--json", type=Path, metavar="PATH", help="where to write every sample")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


# --- a worker, which has one system


class _Work:
    """The states, and one system that saves them."""

    def __init__(self, name: str, directory: Path) -> None:
        import torch
        from torch import nn

        from gpt import Gpt

        self.torch = torch
        self.name, self.directory = name, directory
        self.gpu = torch.cuda.is_available()
        device = "cuda" if self.gpu else "cpu"
        if not self.gpu:
            torch.set_num_threads(1)
            Gpt.VOCABULARY, Gpt.CONTEXT = 64, 16
        torch.manual_seed(0)
        with torch.device(device):
            width, heads = (1536, 24) if self.gpu else (8, 2)
            self.model = Gpt(width=width, layers=16, heads=heads)
            self.model.head.weight = nn.Parameter(self.model.head.weight.detach().clone())  # untied: 197 tensors
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=self.gpu)
            batch, length = (8, 1024) if self.gpu else (2, 16)
            self.tokens = torch.randint(Gpt.VOCABULARY, (batch, length + 1))
            self.one = torch.ones(64)
            self.large = torch.ones((1 << 26) if self.gpu else (1 << 20))
        self.iterate()
        self.step = 0

    def iterate(self, gate: Callable[[], Any] | None = None) -> None:
        """One training iteration."""
        torch = self.torch
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=self.gpu):
            logits = self.model(self.tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten())
        loss.backward()
        if gate is None:
            self.optimizer.step()
        else:
            with gate():
                self.optimizer.step()

    def synchronize(self) -> None:
        if self.gpu:
            self.torch.cuda.synchronize()

    def save(self, case: str) -> tuple[Callable[[], object], Callable[[], Sample]]:
        """Functions that save the state of a case, and that wait until it is durable and return more figures."""
        raise NotImplementedError

    gate: Callable[[], Any] | None = None

    def call(self, case: str) -> Sample:
        """Time one call."""
        save, end = self.save(case)
        if case.startswith("GPT"):
            self.iterate()
        self.synchronize()
        if "busy" in case:
            self.iterate()
        cpu, begin = time.thread_time(), time.perf_counter()
        save()
        sample = {"call": time.perf_counter() - begin, "cpu": time.thread_time() - cpu}
        sample |= end()
        self.synchronize()
        return sample

    def loop(self) -> Sample:
        """Time a period of training without a checkpoint, and one that begins with one."""
        plain = self._period(None)
        save, end = self.save("GPT, from_stateful, idle")
        self.synchronize()
        begin = time.perf_counter()
        save()
        called = time.perf_counter()
        seconds = called - begin + self._period(self.gate)
        end()
        durable = time.perf_counter() - begin
        return {
            "call": called - begin,
            "lost": seconds - plain,
            "iteration": plain / PERIOD,
            "backlog": max(0.0, durable - seconds),
        }

    def _period(self, gate: Callable[[], Any] | None) -> float:
        self.synchronize()
        begin = time.perf_counter()
        for _ in range(PERIOD):
            self.iterate(gate)
        self.synchronize()
        return time.perf_counter() - begin


class _Build(_Work):
    """A build of datastates."""

    def __init__(self, name: str, directory: Path) -> None:
        super().__init__(name, directory)
        import datastates as ds
        from datastates.providers import from_state_dict, from_stateful

        model, optimizer = self.model, self.optimizer
        stateful = [from_stateful("model", model), from_stateful("optimizer", optimizer)]
        functions = [from_state_dict("model", model.state_dict), from_state_dict("optimizer", optimizer.state_dict)]
        one, large = {"tensor": self.one}, {"tensor": self.large}
        self.providers = {
            "GPT, from_stateful": stateful,
            "GPT, functions": functions,
            "one tensor of 64": [from_state_dict("state", lambda: one)],
            "one tensor of 0.27": [from_state_dict("state", lambda: large)],
        }
        nbytes = sum(t.nbytes for t in self.model.parameters()) * 3 if self.gpu else 64 << 20
        cache = (nbytes // (64 << 20) + 2) * (64 << 20)
        self.checkpointers = {
            key: ds.Checkpointer(
                directory / str(i), keep_last=1, host_cache=cache if key.startswith("GPT") else "512MiB"
            )
            for i, key in enumerate(self.providers)
        }
        print(f"{name}: {Path(ds.__file__).parent}", file=sys.stderr)

    def save(self, case: str) -> tuple[Callable[[], object], Callable[[], Sample]]:
        key = next(key for key in self.providers if case.startswith(key))
        self.step += 1
        taken: list[Any] = []

        def save() -> None:
            taken.append(self.checkpointers[key].snapshot(self.providers[key], step=self.step))

        def end() -> Sample:
            taken[0].wait_committed()
            native = taken[0].report.stages.get("submit")
            return {} if native is None else {"native": native.seconds}

        return save, end

    def close(self) -> None:
        for checkpointer in self.checkpointers.values():
            checkpointer.close()


class _Peer(_Work):
    """torch_checkpointing."""

    def __init__(self, name: str, directory: Path) -> None:
        super().__init__(name, directory)
        from peers import class_of

        self.system = class_of(PEER)(directory)
        gpt = {"model": self.model, "optimizer": self.optimizer}
        self.states: dict[str, Any] = {
            "GPT": gpt,
            "one tensor of 64": {"state": {"tensor": self.one}},
            "one tensor of 0.27": {"state": {"tensor": self.large}},
        }
        self.gate = self.system.gate

    def save(self, case: str) -> tuple[Callable[[], object], Callable[[], Sample]]:
        from write import remove

        state = next(state for key, state in self.states.items() if case.startswith(key))
        pending: list[Any] = []

        def end() -> Sample:
            pending[0].wait()
            remove(pending[0].path)
            return {}

        return lambda: pending.append(self.system.save_async(state)), end

    def close(self) -> None:
        self.system.close()


def _serve(name: str, directory: Path) -> None:
    work = (_Peer if name == PEER else _Build)(name, directory)
    print("ready", flush=True)
    for line in sys.stdin:
        if not (case := line.strip()):
            break
        try:
            sample = work.loop() if case == LOOP else work.call(case)
        except Exception as error:  # the other systems go on
            print(f"{name}, {case}: {type(error).__name__}: {error}", file=sys.stderr)
            sample = {}
        print(json.dumps(sample), flush=True)
    work.close()


# --- the parent, which runs them in turn


class _Worker:
    def __init__(self, name: str, build: Path | None, directory: Path) -> None:
        directory.mkdir()
        paths = [str(build)] * (build is not None) + os.environ.get("PYTHONPATH", "").split(os.pathsep)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONSAFEPATH": ""}
        command = [sys.executable, __file__, "--worker", name, "--directory", str(directory)]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._await("ready")

    def _await(self, text: str) -> None:
        if (line := self._line()) != text:
            raise RuntimeError(f"a worker said {line!r} and not {text!r}")

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def __call__(self, case: str) -> Sample:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{case}\n")
        self._process.stdin.flush()
        sample: Sample = json.loads(self._line() or "{}")
        return sample

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _unpacked(build: str, room: Path) -> tuple[str, Path]:
    name, _, path = build.partition("=")
    if not path.endswith(".whl"):
        return name, Path(path).absolute()
    folder = room / f"build-{name}"
    with zipfile.ZipFile(path) as wheel:
        wheel.extractall(folder)
    return name, folder


def _milliseconds(values: list[float]) -> str:
    if not values:
        return f"{'':>24}"
    return f"{median(values) * 1e3:8.3f}{min(values) * 1e3:8.3f}{max(values) * 1e3:8.3f}"


def _lines(samples: dict[str, dict[str, list[Sample]]]) -> Iterator[str]:
    yield f"milliseconds{'':<18}{'first':>8}{'second':>8}{'median':>8}{'min':>8}{'max':>8}  of it CPU, native   ratio"
    for case, found in samples.items():
        yield case
        warm_up = 0 if case == LOOP else _WARM_UP
        ours = [s["call"] for s in found.get(INSTALLED, [])[warm_up:]]
        for name, every in found.items():
            if not every:
                continue
            early, late = every[:warm_up], every[warm_up:]
            calls = [s["call"] for s in late]
            first = "".join(f"{s['call'] * 1e3:8.2f}" for s in early)
            inner = "".join(
                f"{median(of) * 1e3:8.3f}" if (of := [s[key] for s in late if key in s]) else f"{'-':>8}"
                for key in ("cpu", "native")
            )
            ratio = f"{median(ours) / median(calls):8.2f}" if ours and calls else ""
            yield f"  {name:<28}{first:>16}{_milliseconds(calls)}  {inner}  {ratio}"
            if case == LOOP:
                told = ", ".join(
                    f"{key} {median(s[key] for s in every) * 1e3:.1f}" for key in ("iteration", "lost", "backlog")
                )
                yield f"  {'':<28}{told}"
    yield f"ratio: the median call of {INSTALLED} by that of the line"


def main() -> int:
    """Run the systems in turn, and print their calls side by side."""
    arguments = _arguments()
    if arguments.worker:
        _serve(arguments.worker, arguments.directory)
        return 0
    end = time.monotonic() + arguments.seconds
    arguments.directory.mkdir(parents=True, exist_ok=True)
    samples: dict[str, dict[str, list[Sample]]] = {}
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="call-cost-") as room:
        builds: dict[str, Path | None] = {INSTALLED: None}
        builds |= dict(map(partial(_unpacked, room=Path(room)), arguments.build))
        if not arguments.no_peer:
            builds[PEER] = None
        workers = {
            name: _Worker(name, path, Path(room) / f"files-{i}") for i, (name, path) in enumerate(builds.items())
        }
        wanted = [case for case in CASES if not arguments.only or any(text in case for text in arguments.only)]
        for cases, rounds in ((wanted, arguments.rounds), ([LOOP], arguments.loops)):
            for _ in range(rounds):
                for case in cases:
                    for name, worker in workers.items():
                        if time.monotonic() < end and (sample := worker(case)):
                            samples.setdefault(case, {}).setdefault(name, []).append(sample)
        for worker in workers.values():
            worker.close()
    print("\n".join(_lines(samples)))
    if arguments.json:
        arguments.json.write_text(json.dumps(samples, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
