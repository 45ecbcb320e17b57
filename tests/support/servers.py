"""Servers of object stores, started on this machine for tests."""

from __future__ import annotations

import base64
import contextlib
import email.utils
import hashlib
import hmac
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

AZURITE = Path(__file__).parents[2] / "build/azurite/node_modules/.bin/azurite-blob"
"""The server of Azure's protocol, where the Makefile puts it if npm is there."""
ROOTS = {**dict.fromkeys(("moto", "localbucket", "nanio", "radosgw"), "s3://bucket"), "azurite": "az://bucket"}
"""For each server, the address of its bucket."""
SECRET = base64.b64encode(b"canary-0123456789-secret").decode()
ENDPOINTS = ("AWS_ENDPOINT_URL", "AZURITE_BLOB_STORAGE_URL")
"""The variables that name a server."""
_START_S = 60


def each(*kinds: str) -> list[Any]:
    """The parameters of tests that run on several servers. Azure's is started anew in seconds: those are long."""
    marks = {"azurite": [pytest.mark.long], "radosgw": [pytest.mark.by_hand]}
    return [pytest.param(kind, marks=marks.get(kind, [])) for kind in kinds]


@contextlib.contextmanager
def server(kind: str, folder: Path) -> Iterator[dict[str, str]]:
    """Start a server with an empty bucket; yields the environment that obstore needs for it.

    The test is skipped where the server is not installed. One of radosgw, which takes a cluster, is found at RADOSGW.
    """
    if kind == "radosgw":
        yield _of_radosgw()
        return
    if kind == "azurite":
        if not (AZURITE.exists() and shutil.which("node")):
            pytest.skip(f"{AZURITE} is not there: `make azurite` installs it where npm is")
    else:
        pytest.importorskip(kind)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = ["--host", "127.0.0.1", "--port", port]
    commands: dict[str, list[str | Path]] = {
        "moto": [sys.executable, Path(__file__).with_name("moto_server.py"), *place],
        "localbucket": [sys.executable, "-m", "localbucket", *place, folder],
        "nanio": [sys.executable, "-m", "nanio", "serve", *place, "--data-dir", folder],
        "azurite": [AZURITE, "--blobPort", port, "--location", folder, "--silent", "--disableTelemetry"],
    }
    accounts = {"AZURITE_ACCOUNTS": f"account:{SECRET}", "NANIO_ACCESS_KEY": "key", "NANIO_SECRET_KEY": SECRET}
    (folder / "bucket").mkdir()  # which is a bucket of the servers that have files only
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(commands[kind], stdout=log, stderr=log, cwd=folder, env={**os.environ, **accounts})
    try:
        _wait(int(port), process)
        url = f"http://127.0.0.1:{port}"
        if kind == "azurite":
            urllib.request.urlopen(_azure_bucket(url)).close()
        elif kind == "moto":
            urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT")).close()
        yield _of_azure(url) if kind == "azurite" else _of_s3(url)
    finally:
        process.kill()
        process.wait()


def _of_s3(url: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
    }


def _of_radosgw() -> dict[str, str]:
    """The environment for the server at RADOSGW, which has the user of :func:`_of_s3`; makes the bucket."""
    if not (url := os.environ.get("RADOSGW", "")):
        pytest.skip("RADOSGW has no address of a server")
    environment = _of_s3(url)
    keys = {name.lower(): environment[name.upper()] for name in ("aws_access_key_id", "aws_secret_access_key")}
    client = pytest.importorskip("boto3").client("s3", endpoint_url=url, region_name="us-east-1", **keys)
    client.create_bucket(Bucket="bucket")
    return environment


def _of_azure(url: str) -> dict[str, str]:
    return {
        "AZURITE_BLOB_STORAGE_URL": url,
        "AZURE_STORAGE_USE_EMULATOR": "true",
        "AZURE_STORAGE_ACCOUNT_NAME": "account",
        "AZURE_STORAGE_ACCOUNT_KEY": SECRET,
    }


def _azure_bucket(url: str) -> urllib.request.Request:
    """The signed request that makes the bucket."""
    headers = {"x-ms-date": email.utils.formatdate(usegmt=True), "x-ms-version": "2021-12-02"}
    signed = "\n".join(f"{name}:{value}" for name, value in headers.items())
    text = "PUT" + "\n" * 12 + f"{signed}\n/account/account/bucket\nrestype:container"
    signature = base64.b64encode(hmac.digest(base64.b64decode(SECRET), text.encode(), hashlib.sha256)).decode()
    headers["Authorization"] = f"SharedKey account:{signature}"
    return urllib.request.Request(f"{url}/account/bucket?restype=container", method="PUT", headers=headers)


def _wait(port: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until a server takes connections."""
    until = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < until:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port)).close()
            return
        time.sleep(0.05)
    raise RuntimeError(f"the server ended with {process.returncode}, or took {_START_S} s to start: see its log")
