"""Several processes, each a rank of torch.distributed, that run the same commands together."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # it is in the documentation

import member
from sharded import Kind

_LONGEST = 180.0
"""Seconds that a command may take, the start of the processes included."""
_AFTERMATH = 5.0
"""Seconds that the other ranks have to answer, once one rank has failed."""
# Imported once, in a server from which all ranks are forked: each team would spend seconds on them. It does not search
# this folder, so no module of the benchmarks is among them.
_IMPORTED = ["datastates", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor"]


class Team:
    """Ranks that each have a :class:`member.Member`, started at the first command.

    Each has a :class:`sharded.ShardedLoop`, of that kind and cut. When a command fails on one rank, all ranks are
    killed, since the others may wait for it for ever. The next command starts new ranks.
    """

    def __init__(self, size: int, kind: Kind, cut: int = 0) -> None:
        self._size = size
        self._model = kind, cut
        self._store: TCPStore | None = None
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []

    def __enter__(self) -> Team:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self._connections:
            connection.close()  # the processes end when it closes
        end = time.monotonic() + _AFTERMATH
        for process in self._processes:
            process.join(max(0.0, end - time.monotonic()))
        self._kill()

    @property
    def running(self) -> bool:
        """Whether there are processes now."""
        return bool(self._processes)

    def call(self, command: str, **arguments: Any) -> list[Any]:
        """Have all ranks run a method of their member at once; returns each rank's result.

        Raises:
            RuntimeError: The method failed on a rank, or a rank died.
            TimeoutError: Some ranks did not answer in time.
        """
        if not self._processes:
            self._start()
        for connection in self._connections:
            with contextlib.suppress(ConnectionError):  # a dead rank is noticed below
                connection.send((command, arguments))
        answers: dict[int, Any] = {}
        failures: dict[int, str] = {}
        end = time.monotonic() + _LONGEST
        while waiting := {c: rank for rank, c in enumerate(self._connections) if rank not in answers.keys() | failures}:
            ready = wait(list(waiting), max(0.0, end - time.monotonic()))
            if not ready:
                break
            for rank in [rank for connection, rank in waiting.items() if connection in ready]:
                fine, answer = self._answer(rank)
                (answers if fine else failures)[rank] = answer
                if not fine:
                    end = min(end, time.monotonic() + _AFTERMATH)
        if len(answers) < self._size:
            self._kill()
            if failures:
                raise RuntimeError("; ".join(f"rank {rank}: {failures[rank]}" for rank in sorted(failures)))
            missing = sorted(set(range(self._size)) - answers.keys())
            raise TimeoutError(f"ranks {missing} have not finished {command} after {_LONGEST:g} s")
        return [answers[rank] for rank in range(self._size)]

    def _answer(self, rank: int) -> tuple[bool, Any]:
        """Whether a rank's command succeeded, and its result or the reason."""
        try:
            fine, answer = self._connections[rank].recv()
        except (EOFError, ConnectionError):
            self._processes[rank].join(_AFTERMATH)
            return False, f"ended with exit code {self._processes[rank].exitcode}"
        return fine, answer

    def _start(self) -> None:
        # hosted here and not by rank 0: the port is free for certain, and no rank's death takes the Store away
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_IMPORTED)
        for rank in range(self._size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=member.serve, args=(theirs, rank, self._size, self._store.port, *self._model), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections, self._store = [], [], None
