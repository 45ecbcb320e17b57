"""Run one attack after another, each in a fork of its own with little memory and little time; see conftest.py.

For each attack it reads a line of JSON, and writes a line of JSON about the fork: the error, the memory that it took,
and the code that it ran.
"""

from __future__ import annotations

import codecs
import importlib
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import datastates as ds
from datastates.commit import manifest
from datastates.container import pickle_reader
from datastates.container.file import open_container
from datastates.container.pickle_picker import Picked
from datastates.container.unbuilt import Unbuilt
from datastates.errors import DatastatesError, FormatError
from datastates.formats.own import verify_container
from datastates.providers import HostTensorProvider, PickledObjectProvider, from_state_dict
from datastates.reading.every_container import open_checkpoint

SMALL = {"host_cache": "2MiB", "block": "1MiB", "io_backend": "pwrite", "io_threads": 1}
PARTS = [("w", (4, 6), torch.float32), ("cut", (10,), torch.float16), ("alike", (3,), torch.int64)]
PARTS.append(("none", (0, 4), torch.float32))
MEMORY = 1 << 30
SECONDS = 10
RUNS_CODE = {"os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "exec", "compile", "import"}
RUNS_CODE |= {"ctypes.dlopen", "os.remove", "socket.connect", "code.__new__", "function.__new__"}


def attack(action: str, path: str, data: bytes, trust: Any) -> object:
    match action:
        case "loads":
            return pickle_reader.loads(data, trust=trust)
        case "pick":
            picked = Picked(data, lambda stored: Unbuilt(), trust)
            picked.vet(picked.value)
            return picked.value
        case "manifest":
            return manifest.decode(data, "manifest.json")
        case "open":
            return open_container(Path(path))
        case "open_checkpoint":
            return open_checkpoint(Path(path))
        case "verify":
            problems = [p for c in open_checkpoint(Path(path))[1] for p in verify_container(c, lambda _: None)]
            if problems:
                raise FormatError(f"{problems[0].key} {problems[0].what}")
            return None
        case "load":
            return ds.load(path, trust=trust, **SMALL)
        case "restore_object":
            taken: list[object] = []
            provider = PickledObjectProvider("m", get=dict, set=taken.append)
            ds.restore([provider], path, trust=trust, **SMALL)
            return taken
        case "restore_state":
            ds.restore([from_state_dict("m", {"w": torch.zeros(4)})], path, trust=trust, **SMALL)
            return None
        case "restore_parts":
            # a part of each tensor of the golden checkpoint of two ranks, so that its catalog is used
            ds.restore([HostTensorProvider("m", {k: torch.zeros(n, dtype=t) for k, n, t in PARTS})], path, **SMALL)
            return None
        case "open_arrays":
            with ds.open(path, **SMALL) as checkpoint:
                if missing := [key for key, _, _ in PARTS if f"m/{key}" not in checkpoint]:
                    raise DatastatesError(f"no {missing}")
                return [(checkpoint[f"m/{key}"], checkpoint.digest(f"m/{key}")) for key, _, _ in PARTS]
        case "restore_built":
            ds.restore([from_state_dict("m", lambda: {"a": 5})], path, trust=trust, **SMALL)
            return None
    raise AssertionError(action)


def perform(request: dict[str, Any]) -> dict[str, Any]:
    """Run the attack, in the fork; returns its outcome."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    code: list[str] = []
    sys.addaudithook(lambda event, args: code.append(f"{event} {args!r:.200}") if event in RUNS_CODE else None)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    error: BaseException | None = None
    value: object = None
    try:
        value = attack(request["action"], request["path"], bytes.fromhex(request["data"]), request["trust"])
    except BaseException as raised:
        error = raised
    del value
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    chain, link = [], error
    while link is not None:
        chain.append(type(link).__name__)
        link = link.__cause__ or link.__context__
    return {
        "error": chain[0] if chain else None,
        "chain": chain,
        "message": str(error)[:2000],
        "is_ours": isinstance(error, DatastatesError),
        "is_format": isinstance(error, FormatError),
        "grown": grown * 1024,
        "code": list(code),
    }


def serve() -> None:
    for name in ("utf-8-sig", "utf-16", "utf-32"):  # lazy imports happen here, before the audit begins
        codecs.lookup(name)
    importlib.import_module("ml_dtypes")
    np.unique(np.zeros(1))
    for line in sys.stdin:
        request = json.loads(line)
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGXCPU, signal.SIG_DFL)
            os.close(read_end)
            with os.fdopen(write_end, "w") as pipe:
                json.dump(perform(request), pipe)
            os._exit(0)
        os.close(write_end)
        with os.fdopen(read_end) as pipe:
            answer = pipe.read()
        _, status = os.waitpid(child, 0)
        died = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        print(answer if answer and not died else json.dumps({"died": signal.Signals(died or 1).name}), flush=True)


if __name__ == "__main__":
    serve()
