"""Servers and networks that fail: what is read is right or an error, and errors say what happened, without secrets."""

from __future__ import annotations

import errno
import itertools
import logging
import pickle
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import servers
from fault_server import FaultServer

import datastates as ds
from datastates.cli import main
from datastates.errors import FormatError, StorageError, UncertainError
from datastates.providers import from_state_dict
from datastates.storage import Location, register, stores
from datastates.storage.buckets import Buckets
from datastates.testing import equal

pytestmark = pytest.mark.long

pytest.importorskip("obstore")


ONE_SERVER = pytest.mark.parametrize("kind", ["moto"], indirect=True, scope="module")
"""For what is the same whatever the server is."""


@pytest.fixture(scope="module", params=servers.each("moto", "azurite"))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def proxy(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultServer]:
    with servers.server(kind, tmp_path_factory.mktemp(kind)) as environment, FaultServer(environment) as faults:
        yield faults


@pytest.fixture
def faults(proxy: FaultServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultServer]:
    for name, value in proxy.environment.items():
        monkeypatch.setenv(name, value)
    yield proxy
    proxy.clear()


@pytest.fixture
def root(kind: str) -> Location:
    return Location(f"{servers.ROOTS[kind]}/{uuid.uuid4().hex}")


@pytest.fixture
def store(faults: FaultServer, root: Location, monkeypatch: pytest.MonkeyPatch) -> Buckets:
    """A patient store, registered."""
    made = Buckets(patience=30)
    monkeypatch.setattr(stores, "KINDS", dict(stores.KINDS))
    register(root.scheme, made)
    return made


STATE = {"w": np.arange(50_000.0), "b": np.ones(7), "step": 5}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a directory of checkpoints with one of them."""
    folder = tmp_path_factory.mktemp("run")
    with ds.Checkpointer(folder) as checkpointer:
        checkpointer.snapshot([from_state_dict("model", STATE)], step=5)
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.glob("step-*/*")}


def put(store: Buckets, root: Location, files: dict[str, bytes]) -> str:
    for name, data in files.items():
        store.create(root / name, data)
    return str(root)


@pytest.fixture
def run(store: Buckets, root: Location, files: dict[str, bytes]) -> str:
    return put(store, root, files)


def opened(run: str) -> Any:
    with ds.open(run) as checkpoint:
        return {"model/w": checkpoint["model/w"], "model/b": checkpoint["model/b"]}


def restored(run: str) -> Any:
    live = from_state_dict("model", blank := {"w": np.zeros(50_000), "b": np.zeros(7), "step": 0})
    ds.restore([live], run)
    return blank


READS: list[Callable[[str], Any]] = [ds.load, opened, restored]


def save(run: str) -> None:
    with ds.Checkpointer(run) as checkpointer:
        checkpointer.snapshot([from_state_dict("model", STATE)], step=5).wait_committed()


VERBS: dict[str, Callable[[Buckets, Location], object]] = {
    "look": lambda store, path: store.look(path),
    "list": lambda store, path: [store.entries(path), store.entries(path, deep=True)],
    "read": lambda store, path: store.read(path, 1, 2),
    "write": lambda store, path: store.replace(path, b"1234"),
    "create": lambda store, path: store.create(path, b"1234"),
    "remove": lambda store, path: store.discard([path]),
}


@pytest.mark.parametrize("fault", ["answer", "lose", "cut_down"])
@pytest.mark.parametrize("verb", ["look", "list", "read", "write", "remove"])
def test_a_request_that_fails_once_is_sent_again(
    store: Buckets, faults: FaultServer, root: Location, fault: str, verb: str
) -> None:
    path = root / "a"
    store.create(path, b"1234")
    usual = VERBS[verb](store, path.parent if verb == "list" else path)
    spoiled = faults.add(fault, times=2 if fault == "answer" else 1)
    assert VERBS[verb](store, path.parent if verb == "list" else path) == usual
    assert spoiled.met.is_set()


@ONE_SERVER
def test_a_checkpoint_is_read_where_every_fifth_request_fails(faults: FaultServer, run: str) -> None:
    usual = [read(run) for read in READS]
    faults.clear()
    kinds = itertools.cycle(["cut_down", "lose", "answer"])
    spoiled = [faults.add(kind, first=first) for kind, first in zip(kinds, range(1, 300, 5), strict=False)]
    assert all(equal(read(run), expected) for read, expected in zip(READS, usual, strict=True))
    assert sum(one.met.is_set() for one in spoiled) > 5


def verified(run: str) -> None:
    if main(["verify", run]) != 0:
        raise FormatError("/rank-00000.pt or /manifest.json, as verify has printed")


@ONE_SERVER
@pytest.mark.parametrize("read", [*READS, verified])
@pytest.mark.parametrize("name", ["/rank-00000.pt", "/manifest.json"])
def test_a_bit_that_flips_on_the_way_down_is_never_silent(
    store: Buckets, faults: FaultServer, root: Location, files: dict[str, bytes], name: str, read: Callable[[str], Any]
) -> None:
    usual, found = read(put(store, root, files)), list[str]()
    for first in itertools.count(1):
        run = put(store, root / str(first), files)  # nothing of it is remembered
        faults.clear()
        flipped = faults.add("flip_down", "GET", name, first=first)
        try:
            assert equal(read(run), usual), "only bytes that nobody wants may differ"
        except FormatError as error:
            found.append(str(error))
        if not flipped.met.is_set():
            break
    assert found or name != "/manifest.json", "arrays are asked for once more"
    assert all(name in text for text in found)


@ONE_SERVER
def test_a_bit_that_flipped_on_the_way_up_is_found(store: Buckets, faults: FaultServer, run: str) -> None:
    path = Location(run) / "step-00000005" / "rank-00000.pt"
    data = store.read_all(path)
    faults.add("flip_up", "PUT")
    store.replace(path, data)
    assert store.read_all(path) != data, "stores do not notice it"
    with pytest.raises(FormatError, match=r"rank-00000\.pt does not match its checksum"):
        ds.load(run)


# --- creating


@pytest.mark.parametrize(("fault", "made"), [("lose", True), ("cut_up", False), ("answer", False)])
def test_a_create_without_an_answer_is_uncertain(
    store: Buckets, faults: FaultServer, root: Location, fault: str, made: bool
) -> None:
    faults.add(fault)
    with pytest.raises(UncertainError, match=f"create {root / 'a'}: "):
        store.create(root / "a", b"mine")
    assert len(faults.requests) == 1, "a repeat would find the object that the first one made"
    assert (store.look(root / "a") is not None) is made


def test_a_create_may_arrive_late(store: Buckets, faults: FaultServer, root: Location) -> None:
    late = faults.add("late")
    with pytest.raises(UncertainError):
        store.create(root / "a", b"late")
    assert store.look(root / "a") is None
    late.go.set()
    late.done.wait()
    assert store.read_all(root / "a") == b"late"


@pytest.mark.parametrize("status", [409, 412])
def test_a_create_that_is_refused_has_the_number_of_an_object_that_is_there(
    store: Buckets, faults: FaultServer, root: Location, status: int
) -> None:
    faults.add("answer", status=status)
    with pytest.raises(StorageError) as caught:
        store.create(root / "a", b"mine")
    assert (caught.value.errno, type(caught.value)) == (errno.EEXIST, StorageError)


# --- other answers


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("verb", VERBS)
def test_who_is_denied_is_told_so(store: Buckets, faults: FaultServer, root: Location, verb: str, status: int) -> None:
    faults.add("answer", status=status)
    with pytest.raises(StorageError, match=f"^{verb} {root / 'a'}: {status} ") as caught:
        VERBS[verb](store, root / "a")
    assert (caught.value.errno, caught.value.operation) == (errno.EACCES, verb)
    assert not isinstance(caught.value, UncertainError)


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "create"])
def test_only_a_create_meets_an_object_that_is_there(
    store: Buckets, faults: FaultServer, root: Location, verb: str
) -> None:
    faults.add("answer", status=409)
    with pytest.raises(StorageError, match="409 Conflict") as caught:
        VERBS[verb](store, root / "a")
    assert caught.value.errno == 0


def test_a_silent_server_is_waited_for(store: Buckets, faults: FaultServer, root: Location) -> None:
    store.create(root / "a", b"1234")
    held, found = faults.add("hold", "GET"), list[bytes]()
    thread = threading.Thread(target=lambda: found.append(store.read(root / "a", 0, 4)))
    thread.start()
    held.met.wait()
    assert not found
    held.go.set()
    thread.join()
    assert found == [b"1234"]


def test_a_server_that_stays_silent_is_given_up(
    store: Buckets, faults: FaultServer, root: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_TIMEOUT", "AZURE_TIMEOUT"):
        monkeypatch.setenv(name, "200ms")
    faults.add("hold", times=1000)
    with pytest.raises(StorageError, match=f"^read {root / 'a'}: HTTP error: "):
        Buckets(patience=0.1).read(root / "a", 0, 4)


# --- in pieces


def write(store: Buckets, path: Location) -> bytes:
    data = [bytes([number]) * (5 << 20) for number in range(2)]
    writer = store.writer(path)
    try:
        for number, piece in enumerate(data):
            writer.write(piece, number * (5 << 20))
        writer.finish()
    finally:
        writer.close()
    return b"".join(data)


@pytest.mark.parametrize("fault", ["answer", "lose", "cut_up"])
def test_a_piece_that_fails_once_is_sent_again(store: Buckets, faults: FaultServer, root: Location, fault: str) -> None:
    spoiled = faults.add(fault, "PUT", first=2)
    data = write(store, root / "a")
    assert spoiled.met.is_set()
    assert store.read_all(root / "a") == data


@pytest.mark.parametrize("kind", servers.each("moto", "localbucket", "azurite"), indirect=True, scope="module")
def test_an_upload_whose_last_answer_is_lost_is_done_or_uncertain(
    store: Buckets, faults: FaultServer, root: Location, kind: str
) -> None:
    method, part = ("PUT", "comp=blocklist") if kind == "azurite" else ("POST", "uploadId=")
    lost = faults.add("lose", method, part)
    if kind == "moto":  # which answers a repeat with the object
        write(store, root / "a")
    else:
        with pytest.raises(UncertainError, match=f"write {root / 'a'}: "):
            write(store, root / "a")
    assert lost.met.is_set()
    assert store.length(root / "a") == 10 << 20


def test_an_upload_to_a_server_that_is_gone_says_so(store: Buckets, faults: FaultServer, root: Location) -> None:
    def pieces() -> Iterator[bytes]:
        yield bytes(8 << 20)
        faults.add("answer", times=1000)  # a look at what was made gets no answer, either
        yield bytes(8 << 20)

    with pytest.raises(UncertainError, match=f"^write {root / 'a'}: 503 Service"):
        Buckets(patience=0.1).upload(root / "a", pieces(), 16 << 20)


def test_an_upload_that_is_denied_is_aborted(store: Buckets, faults: FaultServer, root: Location, kind: str) -> None:
    faults.add("answer", "PUT", "block" if kind == "azurite" else "partNumber", times=1000, status=403)
    with pytest.raises(StorageError, match=f"write {root / 'a'}: ") as caught:
        write(store, root / "a")
    assert caught.value.errno == errno.EACCES
    aborted = [one for one in faults.requests if one.method == "DELETE" and "uploadId=" in one.path]
    assert len(aborted) == (kind != "azurite"), "Azure forgets blocks that no list names"
    assert store.entries(root) == {}


# --- saving


@pytest.mark.by_hand
@ONE_SERVER
def test_a_save_is_committed_though_an_answer_is_lost(store: Buckets, faults: FaultServer, root: Location) -> None:
    state = {"w": np.arange(1_500_000.0), "step": 5}  # of two parts
    for first in itertools.count(1):
        run = str(root / str(first))
        faults.clear()
        spoiled = faults.add("lose", first=first)
        with ds.Checkpointer(run) as checkpointer:
            checkpointer.snapshot([from_state_dict("model", state)], step=5).wait_committed()
        met = spoiled.met.is_set()
        faults.clear()
        assert equal(ds.load(run)["model"], state)
        if not met:
            break
    assert first > 20


def test_a_save_that_is_denied_fails_alone(store: Buckets, faults: FaultServer, root: Location) -> None:
    with ds.Checkpointer(str(root)) as checkpointer:
        denied = faults.add("answer", "PUT", "/rank-00000", status=403, times=1000)
        taken = checkpointer.snapshot([from_state_dict("model", STATE)], step=5)
        with pytest.raises(StorageError, match=rf"^write {root}/step-.*: 403 Forbidden, Canary$") as caught:
            taken.wait_committed()
        assert caught.value.errno == errno.EACCES
        assert denied.met.is_set()
        faults.clear()
        checkpointer.snapshot([from_state_dict("model", STATE)], step=6).wait_committed()
        assert checkpointer.steps() == [6]


@pytest.mark.parametrize("kind", ["nanio"], indirect=True, scope="module")
def test_a_store_that_replaces_on_create_is_refused(store: Buckets, root: Location) -> None:
    with pytest.raises(StorageError, match=f"^{root}: the store does not keep its promise: .* save to a store that"):
        save(str(root))
    assert store.entries(root) == {}


# --- secrets


@ONE_SERVER
def test_nothing_of_a_run_has_a_secret(
    store: Buckets,
    faults: FaultServer,
    run: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.DEBUG)
    store._patience = 0
    path, told = Location(run) / "a", [repr(store), str(vars(store).keys())]

    def tell(call: Callable[[], object]) -> None:
        try:
            told.append(repr(call()))
        except (ds.DatastatesError, OSError) as error:
            told.extend([*traceback.format_exception(error), repr(error), repr(pickle.dumps(error)), repr(vars(error))])

    statuses = [400, 401, 403, 404, 409, 500, 503]
    spoiled: list[tuple[str, int]] = [*(("answer", status) for status in statuses), ("lose", 0), ("cut_down", 0)]
    for fault, status in [("", 0), *spoiled]:
        faults.clear()
        if fault:
            faults.add(fault, times=1000, status=status)
        for verb in VERBS.values():
            tell(lambda verb=verb: verb(store, path))
        tell(lambda: write(store, Location(run) / "b"))
        if status in (0, 401, 403) and fault != "lose":  # others are tried for a minute
            tell(partial(save, f"{run}/{status}"))
        for read in (*READS, lambda run: ds.export(run, tmp_path / "file.safetensors")):
            tell(lambda read=read: read(run))
        for command in ("ls", "inspect", "verify"):
            tell(lambda command=command: main([command, run]))
    faults.clear()
    everything = "".join([*told, *capfd.readouterr(), caplog.text]).encode()
    everything += b"".join(store.read_all(Location(run) / name) for name in store.entries(Location(run), deep=True))
    everything += b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    for secret in (servers.SECRET, "Signature", "SharedKey", faults.address, faults.behind):
        assert secret.encode() not in everything, secret
