"""Python processes that start fast: each is forked from a server that has imported the slow modules.

As a script, ``fork_server.py MODULE…`` imports the modules, and serves the socket on its standard input until that is
closed. It does not import ``datastates`` itself, runs no thread, and opens no file. A process forked from it is
therefore as good as a new one, except that all of them share one hash seed.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

REQUEST_BYTES = 128 << 10
# prefixes of the variables that Python, the loader and OpenMP read when a process starts
READ_AT_START = ("PYTHON", "LD_", "OMP_")


class Forked:
    """A process of a ``ForkServer``, with the part of ``subprocess.Popen`` that the tests use."""

    def __init__(self, connection: socket.socket, args: list[str]) -> None:
        self.args = args
        self.returncode: int | None = None
        self._answers = connection.makefile("rb")
        self.pid = self._number()

    def _number(self) -> int:
        if not (line := self._answers.readline()):
            raise RuntimeError("the fork server is gone")
        return int(line)

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while the process runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit status; raises ``TimeoutExpired`` after ``timeout`` seconds."""
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._answers, selectors.EVENT_READ)
                if not selector.select(timeout):
                    raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = self._number()
            self._answers.close()
        return self.returncode


class ForkServer:
    """The parent of processes that have ``modules`` imported. It imports them with ``variables`` in its environment."""

    def __init__(self, modules: Sequence[str], variables: Mapping[str, str]) -> None:
        self._environment = {**os.environ, **variables}
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, *modules], env=self._environment, stdin=theirs, start_new_session=True
            )

    def serves(self, environment: Mapping[str, str]) -> bool:
        """Whether a process with these variables may be forked: those read at the start must be the server's."""
        keys = {k for k in [*environment, *self._environment] if k.startswith(READ_AT_START)}
        return all(environment.get(k) == self._environment.get(k) for k in keys)

    def start(self, args: list[str], environment: Mapping[str, str], out: TextIO, err: TextIO) -> Forked:
        """Run a Python script in a session of its own: ``args`` are its path and its arguments."""
        request = {"args": args, "environment": dict(environment), "directory": os.getcwd()}
        ours, theirs = socket.socketpair()
        with ours, theirs:
            descriptors = [theirs.fileno(), out.fileno(), err.fileno()]
            socket.send_fds(self._requests, [json.dumps(request).encode()], descriptors)
            theirs.close()
            return Forked(ours, args)

    def close(self) -> None:
        """End the server, but not the processes that it has started."""
        self._requests.close()
        self._process.wait()


class Request:
    """A request for a child: its files, folder, variables and arguments."""

    def __init__(self, content: bytes, descriptors: Sequence[int]) -> None:
        self.fields: dict[str, Any] = json.loads(content)
        self.connection = socket.socket(fileno=descriptors[0])
        self.files = descriptors[1:]

    def close(self) -> None:
        for descriptor in self.files:
            os.close(descriptor)

    def become(self) -> None:
        """Turn this process into the child that is requested, in a session of its own."""
        os.setsid()
        null = os.open(os.devnull, os.O_RDONLY)
        for at, descriptor in enumerate([null, *self.files]):
            os.dup2(descriptor, at)
            os.close(descriptor)
        os.chdir(self.fields["directory"])
        os.environ.clear()
        os.environ.update(self.fields["environment"])
        sys.argv[:] = self.fields["args"]
        if not getattr(sys.flags, "safe_path", False):  # with it, sys.path has no folder of a script
            sys.path[0] = str(Path(sys.argv[0]).parent)


def serve() -> Request | None:
    """Fork a child for each request until standard input ends; returns None then, and in each child its request."""
    running: dict[int, socket.socket] = {}
    waker, woken = socket.socketpair()
    waker.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker.fileno())
    requests = socket.socket(fileno=os.dup(0))  # a child replaces its standard input
    with requests, waker, woken, selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        while True:
            if woken in [key.fileobj for key, _ in selector.select()]:
                woken.recv(4096)
                _reap(running)
                continue
            content, descriptors, _, _ = socket.recv_fds(requests, REQUEST_BYTES, 3)
            if not content:
                return None
            request = Request(content, descriptors)
            if (pid := os.fork()) == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for connection in [request.connection, *running.values()]:
                    connection.close()
                return request
            request.close()
            running[pid] = request.connection
            request.connection.sendall(f"{pid}\n".encode())


def _reap(running: dict[int, socket.socket]) -> None:
    """Send the exit statuses of the children that have ended."""
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with running.pop(pid) as connection, contextlib.suppress(BrokenPipeError):
            connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


def run(path: str) -> None:
    """Run a script as the main module."""
    main = types.ModuleType("__main__")
    main.__file__ = path
    sys.modules["__main__"] = main
    exec(compile(Path(path).read_text(), path, "exec"), main.__dict__)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        importlib.import_module(name)
    if (request := serve()) is not None:
        request.become()
        run(sys.argv[0])
