"""Servers of object stores, started on this machine for tests."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

S3 = ("moto", "localbucket")
"""Servers of the S3 protocol, of which a key that exists can be created once."""
SECRET = "canary-0123456789-secret"
_START_S = 60


@contextlib.contextmanager
def server(kind: str, folder: Path) -> Iterator[dict[str, str]]:
    """Start a server with an empty bucket named ``bucket``; yields the environment that obstore needs for it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = ["--host", "127.0.0.1", "--port", str(port)]
    commands: dict[str, list[str | Path]] = {
        "moto": [sys.executable, "-m", "moto.server", *place],
        "localbucket": [sys.executable, "-m", "localbucket", *place, folder],
    }
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(commands[kind], stdout=log, stderr=log, cwd=folder)
    try:
        _wait(port, process)
        url = f"http://127.0.0.1:{port}"
        urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT")).close()
        yield {
            "AWS_ENDPOINT_URL": url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
        }
    finally:
        process.kill()
        process.wait()


def _wait(port: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until a server takes connections."""
    until = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < until:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port)).close()
            return
        time.sleep(0.05)
    raise RuntimeError(f"the server ended with {process.returncode}, or took {_START_S} s to start: see its log")
