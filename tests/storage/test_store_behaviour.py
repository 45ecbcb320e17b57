"""The page "What each store does": each cell of its tables is what a server does, seen through obstore alone.

radosgw is asked by hand, with its address in ``RADOSGW``, and the key and the secret of :mod:`servers`.
"""

from __future__ import annotations

import importlib
import re
import threading
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import servers
from fault_server import FaultServer

pytest.importorskip("obstore")
PAGE = Path(__file__).parents[2] / "docs/store-behaviour.md"
SERVERS = ("moto", "localbucket", "nanio", "azurite", "radosgw")
MIB = 1 << 20


def tables() -> list[dict[str, dict[str, str]]]:
    """The page's tables: what each server does, by row."""
    made = []
    for text in re.findall(r"(?:^\|.*\n)+", PAGE.read_text(), re.M):
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
        names = [name.split()[0].lower() for name in rows[0][1:]]
        made.append({row[0]: dict(zip(names, row[1:], strict=True)) for row in rows[2:]})
    return made


@pytest.fixture(scope="module", params=servers.each(*SERVERS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def proxy(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultServer]:
    with servers.server(kind, tmp_path_factory.mktemp(kind)) as environment, FaultServer(environment) as faults:
        yield faults


class Server:
    """A server with a bucket, behind faults. Requests go through obstore's functions, which are its attributes."""

    def __init__(self, kind: str, faults: FaultServer) -> None:
        self.kind, self.faults, self.name = kind, faults, f"{uuid.uuid4().hex}/a"
        self.versions, self.client = "", None
        self.bucket = self.open(servers.ROOTS[kind])

    def open(self, root: str, **options: Any) -> Any:
        retry = {"max_retries": 3, "backoff": {"init_backoff": timedelta(milliseconds=10)}}
        single = {} if self.kind == "azurite" else {"disable_bulk_delete": True}
        return importlib.import_module("obstore.store").from_url(root, retry_config=retry, **{**single, **options})

    def __getattr__(self, function: str) -> Callable[..., Any]:
        return lambda *given, **named: getattr(importlib.import_module("obstore"), function)(
            self.bucket, *given, **named
        )

    def keep_versions(self) -> None:
        """Go to a new bucket that keeps versions, and may have a retention."""
        boto3 = pytest.importorskip("boto3")
        self.versions, self.client = f"versions-{uuid.uuid4().hex}", boto3.client("s3")
        self.client.create_bucket(Bucket=self.versions, ObjectLockEnabledForBucket=True)
        self.bucket = self.open(f"s3://{self.versions}")

    def create(self, name: str, data: bytes = b"1234") -> None:
        self.put(name, data, mode="create", use_multipart=False)

    def read(self, name: str) -> bytes:
        return bytes(self.get(name).bytes())

    def sizes(self) -> dict[str, int]:
        """The objects beside its name, with their lengths."""
        folder = self.name.partition("/")[0]
        return {one["path"][len(folder) + 1 :]: one["size"] for page in self.list(folder) for one in page}

    def upload(self, name: str, pieces: int = 2, piece: int = 5 * MIB) -> Any:
        """An upload in parts that are on their way, and is not ended."""
        writer = self.open_writer(name, buffer_size=piece, max_concurrency=1)
        for number in range(pieces):
            writer.write(bytes([number]) * piece)
        return writer


@pytest.fixture
def server(kind: str, proxy: FaultServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name, value in proxy.environment.items():
        monkeypatch.setenv(name, value)
    yield Server(kind, proxy)
    proxy.clear()


def outcome(call: Callable[[], object]) -> str:
    """ "done", or the status of the error."""
    try:
        call()
    except FileNotFoundError:
        return "404"
    except (importlib.import_module("obstore.exceptions").BaseError, OSError, ValueError) as error:
        said = re.findall(r"status code: (\d+)", str(error))
        return said[0] if said else "error"
    return "done"


def create_again(server: Server) -> str:
    server.create(server.name, b"first")
    told = outcome(lambda: server.create(server.name, b"second"))
    kept = server.read(server.name) == b"first"
    return f"refused, {told}" if kept else f"{told}, replaces it"


def creates_at_once(server: Server) -> str:
    start, told = threading.Barrier(4), list[str]()

    def make(number: int) -> None:
        start.wait()
        told.append(outcome(lambda: server.create(server.name, bytes([number]))))

    threads = [threading.Thread(target=make, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {1: "one is done", 4: "all are done"}[told.count("done")]


def create_whose_answer_is_lost(server: Server) -> str:
    server.faults.add("lose", "PUT", server.name)
    told = outcome(lambda: server.create(server.name))
    assert server.read(server.name) == b"1234"
    return told


def create_whose_body_is_cut(server: Server) -> str:
    server.faults.add("cut_up", "PUT", server.name, times=9)
    assert outcome(lambda: server.create(server.name)) != "done"
    return {0: "nothing is made", 2: "half is made"}[server.sizes().get("a", 0)]


def range_across_the_end(server: Server) -> str:
    server.create(server.name)
    found = list[bytes]()
    told = outcome(lambda: found.append(bytes(server.get_range(server.name, start=2, length=5))))
    return "what is there" if found == [b"34"] else told


def range_past_the_end(server: Server) -> str:
    server.create(server.name)
    return outcome(lambda: server.get_range(server.name, start=9, length=1))


def lists_after_changes(server: Server) -> str:
    found = []
    for _ in range(10):
        server.create(server.name)
        found.append(server.sizes())
        server.delete(server.name)
        found.append(server.sizes())
    return "right" if found == [{"a": 4}, {}] * 10 else "wrong"


def name_that_is_a_folder_too(server: Server) -> str:
    server.create(server.name)
    return outcome(lambda: server.create(f"{server.name}/b"))


def kept(server: Server, name: str) -> str:
    told = outcome(lambda: server.create(f"{server.name}/{name}"))
    found = [*server.sizes()]
    return "kept" if found == [f"a/{name}"] else f"listed as {found[0][2:]}" if found else told


def name_with_a_percent_sign(server: Server) -> str:
    return kept(server, "a%20b")


def name_with_a_backslash(server: Server) -> str:
    return kept(server, "a\\b")


def remove_the_absent(server: Server) -> str:
    return outcome(lambda: server.delete(server.name))


def remove_in_bulk(server: Server) -> str:
    server.create(server.name)
    if server.kind != "azurite":  # there it is so by itself
        server.bucket = server.open(servers.ROOTS[server.kind], disable_bulk_delete=False)
    return outcome(lambda: server.delete([server.name]))


def parts_under_5_mib(server: Server) -> str:
    return outcome(server.upload(server.name, piece=MIB).close)


def end_whose_answer_is_lost(server: Server) -> str:
    writer = server.upload(server.name)
    server.faults.add("lose", *(("PUT", "comp=blocklist") if server.kind == "azurite" else ("POST", "uploadId=")))
    told = outcome(writer.close)
    assert server.head(server.name)["size"] == 10 * MIB
    return told


def create_after_a_dead_upload(server: Server) -> str:
    part = server.faults.add("hold", "PUT", server.name)
    part.go.set()
    writer = server.upload(server.name)
    part.done.wait()
    del writer
    assert server.sizes() == {}
    return outcome(lambda: server.create(server.name))


def two_uploads_of_a_name(server: Server) -> str:
    writers = [server.upload(server.name), server.upload(server.name)]
    told = [outcome(writer.close) for writer in writers]
    return " and ".join(sorted(told, reverse=True))


def flipped_bits(server: Server) -> str:
    server.faults.add("flip_up", "PUT", server.name)
    told = outcome(lambda: server.create(server.name))
    assert told != "done" or server.read(server.name) == b"1224"  # "2" and "3" differ in one bit
    server.put(server.name, b"1234", use_multipart=False)
    server.faults.add("flip_down", "GET", server.name)
    assert server.read(server.name) == b"1224"
    return "no error" if told == "done" else f"{told} upwards"


def an_answer_that_is_cut(server: Server) -> str:
    server.create(server.name)
    server.faults.add("cut_down", "GET", server.name)
    return "read on" if server.read(server.name) == b"1234" else "wrong"


def reading_without_a_bucket(server: Server) -> str:
    server.bucket = server.open(servers.ROOTS[server.kind].replace("bucket", "nobucket"))
    return f"{outcome(lambda: server.read('a'))}, {outcome(server.sizes)}"


def a_wrong_secret(server: Server) -> str:
    wrong = "d3Jvbmc=" if server.kind == "azurite" else "wrong"
    name = "account_key" if server.kind == "azurite" else "secret_access_key"
    server.bucket = server.open(servers.ROOTS[server.kind], **{name: wrong})
    return outcome(lambda: server.create(server.name))


def tag_of_equal_contents(server: Server) -> str:
    tags = [server.put(server.name, b"1234", use_multipart=False)["e_tag"] for _ in range(2)]
    return "the same" if tags[0] == tags[1] else "another"


def time_stamps(server: Server) -> str:
    server.create(server.name)
    return "seconds" if server.head(server.name)["last_modified"].microsecond == 0 else "finer"


ROWS: dict[str, Callable[[Server], str]] = {
    "`create` of a name that is there": create_again,
    "4 `create` at once": creates_at_once,
    "`create` sent again, as its answer was lost": create_whose_answer_is_lost,
    "`create` whose body was cut": create_whose_body_is_cut,
    "`create` after an upload to that name was killed": create_after_a_dead_upload,
    "end of an upload sent again, as its answer was lost": end_whose_answer_is_lost,
    "two uploads to a name at once": two_uploads_of_a_name,
    "parts under 5 MiB": parts_under_5_mib,
    "range across the end": range_across_the_end,
    "range past the end": range_past_the_end,
    "answer that was cut": an_answer_that_is_cut,
    "bit that flipped, up or down": flipped_bits,
    "lists after `create` and removal": lists_after_changes,
    "name below the name of an object": name_that_is_a_folder_too,
    "name with `%20`": name_with_a_percent_sign,
    "name with a backslash": name_with_a_backslash,
    "removal of the absent": remove_the_absent,
    "removal of several at once": remove_in_bulk,
    "no such bucket: read, list": reading_without_a_bucket,
    "wrong secret": a_wrong_secret,
    "ETag of the same bytes, written again": tag_of_equal_contents,
    "time stamps": time_stamps,
}


SAME = {
    "answer that was cut": "read on",
    "lists after `create` and removal": "right",
    "no such bucket: read, list": "404, 404",
    "time stamps": "seconds",
}
"""What all do: the page says it in a sentence."""
OF_RADOSGW = {"bit that flipped, up or down": "400 upwards", "wrong secret": "403"}
"""Where radosgw does not as moto: another sentence."""


def create_after_removal(server: Server) -> str:
    server.create(server.name)
    server.delete(server.name)
    return outcome(lambda: server.create(server.name))


def list_of_what_was_removed(server: Server) -> str:
    server.create(server.name)
    server.delete(server.name)
    assert server.sizes() == {}
    return "its folder" if server.list_with_delimiter()["common_prefixes"] else "nothing"


def create_under_a_retention(server: Server) -> str:
    rule = {"DefaultRetention": {"Mode": "GOVERNANCE", "Days": 1}}
    server.client.put_object_lock_configuration(
        Bucket=server.versions, ObjectLockConfiguration={"ObjectLockEnabled": "Enabled", "Rule": rule}
    )
    return outcome(lambda: server.create(server.name))


WITH_VERSIONS: dict[str, Callable[[Server], str]] = {
    "`create` of a name that is there": create_again,
    "`create` after a removal": create_after_removal,
    "list of what was removed": list_of_what_was_removed,
    "`create` under a retention": create_under_a_retention,
}


@pytest.mark.parametrize("row", ROWS)
def test_a_cell_is_what_the_server_does(server: Server, kind: str, row: str) -> None:
    cells = {**tables()[0].get(row, {})} or dict.fromkeys(SERVERS, SAME.get(row, ""))
    cells["radosgw"] = OF_RADOSGW.get(row, cells["moto"])
    assert ROWS[row](server) == cells[kind]


@pytest.mark.parametrize("kind", servers.each("moto", "radosgw"), indirect=True, scope="module")
@pytest.mark.parametrize("row", WITH_VERSIONS)
def test_a_cell_is_what_the_server_does_where_versions_are_kept(server: Server, kind: str, row: str) -> None:
    server.keep_versions()
    assert WITH_VERSIONS[row](server) == tables()[1][row][kind]


def test_the_page_has_these_rows() -> None:
    assert [*tables()[0]] == [row for row in ROWS if row not in SAME]
    assert [*tables()[1]] == [*WITH_VERSIONS]
