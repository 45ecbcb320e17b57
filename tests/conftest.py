"""Fixtures that all tests share: containers written to files, and ranks started as torchrun starts them."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from datastates import _native
from datastates._base import faults
from datastates.config import IoSettings
from datastates.executor.make import make_executor
from datastates.providers import from_state_dict
from datastates.ranks.world import SoloWorld
from datastates.saving.container_frame import ContainerFraming
from datastates.saving.engine import Engine
from datastates.saving.saver import Saver
from datastates.saving.snapshot import Snapshot
from datastates.storage import Location

sys.path.insert(0, str(Path(__file__).parent / "support"))
import frameworks
from fork_server import Forked, ForkServer

Ranks = Callable[..., "list[subprocess.CompletedProcess[str]]"]
# after one rank has failed, the others get this long to fail too and to say why
AFTERMATH_SECONDS = 5
# modules that the scripts of most ranks import
OF_TORCH = () if "torch" in frameworks.ABSENT else ("torch.distributed.checkpoint", "torch.distributed.tensor")
IMPORTED = ("msgpack", "numpy", "pydantic", *OF_TORCH)

os.environ.setdefault("DATASTATES_HOST_CACHE", "64MiB")
# eight devices for tests of sharded arrays; read when JAX is first used
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
# DeepSpeed compiles with the ninja that is installed beside this Python
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
# what it compiles belongs to the place where it is installed
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))


@pytest.fixture
def nothing_declared() -> Iterator[None]:
    """Without the classes that a framework in this process has declared safe to torch: they need no trust."""
    serialization = getattr(sys.modules.get("torch"), "serialization", None)
    before = [] if serialization is None else serialization.get_safe_globals()
    if serialization is not None:
        serialization.clear_safe_globals()
    yield
    if serialization is not None:
        serialization.add_safe_globals(before)


def pytest_configure(config: pytest.Config) -> None:
    """Switch off Hypothesis' time limits, as other tests run beside it. Some machines do not have Hypothesis."""
    if config.pluginmanager.hasplugin("hypothesispytest"):
        from hypothesis import HealthCheck, settings

        settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
        settings.load_profile("untimed")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out what needs a framework that is not installed; the header of the output says what that is."""
    return True if frameworks.absent_for(collection_path) else None


def pytest_report_header() -> list[str]:
    """What is left out, by framework."""
    return [f"without {name}, left out: {', '.join(paths)}" for name, paths in frameworks.left_out().items()]


@pytest.fixture(scope="session", autouse=True)
def outside_the_sources(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Work in an empty directory: Python with -c or -m imports from the working directory first."""
    os.chdir(tmp_path_factory.mktemp("work"))


@pytest.fixture(autouse=True)
def no_faults_left() -> Iterator[None]:
    """What a test arms does not outlive it."""
    yield
    _native.clear_faults()
    faults.clear()


WriteFile = Callable[..., Snapshot]


@pytest.fixture(scope="session")
def write_file() -> WriteFile:
    """Return a function that begins to write a value as a single container file; it returns the ``Snapshot``.

    ``write_file(path, value, nested=False, engine=None, attempt="0123abcd")``. Without ``engine`` it makes an
    engine and closes it before it returns: the file is then complete, or its write has failed.
    """

    def write(
        path: Path,
        value: Any,
        *,
        nested: bool = False,
        engine: Engine | None = None,
        attempt: str = "0123abcd",
    ) -> Snapshot:
        settings = IoSettings(host_cache="8MiB", block="1MiB")
        used = engine or Engine(make_executor(settings), SoloWorld(), threads=1, auto_gate=False)
        saver = Saver(used.executor, ContainerFraming(bare=True, nested=nested))
        try:
            provider = from_state_dict("file", value)
            return used.take_file(saver, [provider], Location(path), attempt=attempt, begin=time.monotonic())
        finally:
            if engine is None:
                used.close()

    return write


# environment variables of every rank
SHARED = {
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # torch logs long stacks when a store goes away
}
Process = subprocess.Popen[str] | Forked


@pytest.fixture(scope="session")
def fork_server() -> Iterator[Callable[..., ForkServer]]:
    """Return a function that gives the fork server for some modules; each server starts once in a session."""
    made: dict[tuple[str, ...], ForkServer] = {}
    lock = threading.Lock()

    def server(modules: tuple[str, ...], variables: dict[str, str]) -> ForkServer:
        with lock:
            if modules not in made:
                made[modules] = ForkServer(modules, variables)
            return made[modules]

    yield server
    for each in made.values():
        each.close()


@pytest.fixture
def ranks(tmp_path: Path, fork_server: Callable[..., ForkServer]) -> Iterator[Ranks]:
    """Return a function that runs a script as each of several ranks and returns their completed processes by rank.

    ``ranks(n, script, *arguments, timeout=60, may_fail=(), imported=IMPORTED, alone=False, **variables)``: ``script``
    is a file (a Path) or a source (a str). The test fails, with the output of all ranks, where a rank does not end in
    time, or fails and is not among ``may_fail``. No process outlives the test. Several threads may call it at once.
    Each rank is forked from a process that has the modules ``imported``. It is a new process where ``imported`` is
    empty, or where Python must read other variables when it starts. With ``alone``, the processes do not get the
    variables by which torchrun tells a rank its place.
    """
    with _processes(tmp_path, fork_server) as run:
        yield run


@pytest.fixture(scope="module")
def module_ranks(tmp_path_factory: pytest.TempPathFactory, fork_server: Callable[..., ForkServer]) -> Iterator[Ranks]:
    """``ranks`` with the scope of a module, for results that several of its tests look at."""
    with _processes(tmp_path_factory.mktemp("ranks"), fork_server) as run:
        yield run


def _place(rank: int, n: int, port: str) -> dict[str, str]:
    """The variables by which torchrun tells a rank its place."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n}
    return {**{k: str(v) for k, v in numbers.items()}, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


@contextlib.contextmanager
def _reserved_port() -> Iterator[str]:
    """A port that the system gives no other process. A server that sets SO_REUSEADDR can still listen on it."""
    with socket.socket() as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind(("", 0))
        yield str(keeper.getsockname()[1])


@pytest.fixture
def linking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no file share ranges, as on ext4: whole files are linked."""
    monkeypatch.setattr("datastates.commit.trial.shares_ranges", lambda folder: False)


@contextlib.contextmanager
def _processes(directory: Path, fork_server: Callable[..., ForkServer]) -> Iterator[Ranks]:
    started: list[Process] = []
    numbers = itertools.count()

    def run(
        n: int,
        script: Path | str,
        *arguments: object,
        timeout: float = 60,
        may_fail: Collection[int] = (),
        imported: tuple[str, ...] = IMPORTED,
        alone: bool = False,
        **variables: str,
    ) -> list[subprocess.CompletedProcess[str]]:
        logs = directory / f"ranks-{next(numbers)}"
        logs.mkdir()
        if isinstance(script, str):
            (logs / "script.py").write_text(textwrap.dedent(script))
            script = logs / "script.py"
        server = fork_server(imported, {**SHARED, **variables}) if imported else None
        args = [str(script), *map(str, arguments)]
        processes: list[Process] = []
        with _reserved_port() as port:
            for rank in range(n):
                place = {} if alone else _place(rank, n, port)
                environment = {**os.environ, **SHARED, **place, **variables}
                with (logs / f"{rank}.out").open("w") as out, (logs / f"{rank}.err").open("w") as err:
                    process: Process
                    if server is not None and server.serves(environment):
                        process = server.start(args, environment, out, err)
                    else:
                        command = [sys.executable, *args]
                        process = subprocess.Popen(
                            command, env=environment, stdout=out, stderr=err, text=True, start_new_session=True
                        )
                processes.append(process)
                started.append(process)
            problem = _wait(processes, timeout, may_fail)
        for process in processes:
            _kill(process)
        done = [
            subprocess.CompletedProcess(
                p.args, p.returncode, (logs / f"{rank}.out").read_text(), (logs / f"{rank}.err").read_text()
            )
            for rank, p in enumerate(processes)
        ]
        if problem:
            shown = (f"--- rank {r}: {d.returncode}\n{d.stdout}\n{d.stderr}" for r, d in enumerate(done))
            pytest.fail("\n".join([problem, *shown]))
        return done

    try:
        yield run
    finally:
        for process in started:
            _kill(process)


def _wait(processes: list[Process], timeout: float, may_fail: Collection[int]) -> str | None:
    """Wait at most ``timeout`` seconds until all have ended; returns what went wrong, or None."""
    end, problem = time.monotonic() + timeout, None
    while any(p.poll() is None for p in processes):
        failed = [r for r, p in enumerate(processes) if r not in may_fail and p.poll() not in (None, 0)]
        if failed and problem is None:
            problem = f"rank {failed[0]} failed"
            end = min(end, time.monotonic() + AFTERMATH_SECONDS)
        if time.monotonic() > end:
            running = [r for r, p in enumerate(processes) if p.poll() is None]
            return problem or f"ranks {running} still running after {timeout} s"
        time.sleep(0.02)
    failed = [r for r, p in enumerate(processes) if r not in may_fail and p.returncode != 0]
    return problem or (f"rank {failed[0]} failed" if failed else None)


def _kill(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
