"""Buckets keep a store's contract, and checkpoints in them are read by address: on servers of S3 and Azure."""

from __future__ import annotations

import errno
import os
import pickle
import traceback
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import servers

import datastates as ds
from datastates.cli import main
from datastates.errors import CorruptError, StorageError, UncertainError
from datastates.providers import from_state_dict
from datastates.storage import Location, register, stores
from datastates.storage import buckets as buckets_module
from datastates.storage.buckets import Buckets
from datastates.storage.location import scheme_of
from datastates.testing import StoreTests, equal

pytest.importorskip("obstore")


@pytest.fixture(scope="module", params=servers.each("moto", "localbucket", "azurite"))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def environment(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with servers.server(kind, tmp_path_factory.mktemp(kind)) as environment:
        yield environment


@pytest.fixture(autouse=True)
def _environment(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


class TestBuckets(StoreTests):
    @pytest.fixture(autouse=True)
    def _made(self, kind: str) -> None:
        self.store, self.root = Buckets(patience=1), Location(f"{servers.ROOTS[kind]}/{uuid.uuid4().hex}")


@pytest.fixture
def run(kind: str) -> str:
    """The address of a directory of checkpoints."""
    return f"{servers.ROOTS[kind]}/run"


@pytest.fixture
def buckets(run: str, monkeypatch: pytest.MonkeyPatch) -> Buckets:
    """The store of this test's server, registered."""
    made = Buckets(patience=0.2)
    monkeypatch.setattr(stores, "KINDS", dict(stores.KINDS))
    register(scheme_of(run), made)
    return made


@pytest.fixture
def state() -> dict[str, Any]:
    generator = np.random.default_rng(0)
    return {"w": generator.standard_normal((2500, 430)), "b": generator.standard_normal(7), "step": 5}


@pytest.fixture
def local(buckets: Buckets, run: str, state: dict[str, Any], tmp_path: Path) -> Iterator[Path]:
    """A checkpoint in a directory, of which the bucket has a copy."""
    with ds.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.snapshot([from_state_dict("model", state)], step=5)
    names = [str(path.relative_to(tmp_path / "run")) for path in tmp_path.glob("run/step-*/*")]
    for name in names:
        writer, at = buckets.writer(Location(run) / name), 0
        with (tmp_path / "run" / name).open("rb") as file:
            while piece := file.read(5 << 20):
                writer.write(piece, at)
                at += len(piece)
        writer.finish()
    yield tmp_path / "run"
    buckets.discard([Location(run) / name for name in names])


def test_a_checkpoint_is_read_by_its_address(
    local: Path, run: str, state: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert equal(ds.load(run)["model"], state)
    with ds.open(run) as checkpoint:
        assert equal(checkpoint["model/w"], state["w"])
    live = from_state_dict("model", blank := {"w": np.zeros((2500, 430)), "b": np.zeros(7), "step": 0})
    assert ds.restore([live], run).path == f"{run}/step-00000005"
    assert equal({**blank, "step": 5}, state)
    for target in (local, run):
        ds.export(target, tmp_path / f"{Path(target).parent.name}.safetensors")
    assert (tmp_path / "bucket.safetensors").read_bytes() == (tmp_path / f"{tmp_path.name}.safetensors").read_bytes()
    assert main(["ls", run]) == main(["inspect", run]) == main(["verify", run]) == main(["diff", run, str(local)]) == 0
    assert "step-00000005" in capsys.readouterr().out


def test_little_more_is_read_than_is_wanted(
    local: Path, run: str, state: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    whole = Buckets._range

    def counted(self: Buckets, path: Location, offset: int, nbytes: int) -> memoryview:
        read.append(nbytes)
        return whole(self, path, offset, nbytes)

    with ds.open(run) as checkpoint:
        list(checkpoint)
        monkeypatch.setattr(Buckets, "_range", counted)
        checkpoint["model/w"]
    assert state["w"].nbytes <= sum(read) <= 1.05 * state["w"].nbytes


def test_damage_is_found(local: Path, run: str, buckets: Buckets) -> None:
    path = Location(run) / "step-00000005/rank-00000.pt"
    data = bytearray(buckets.read_all(path))
    data[len(data) // 2] ^= 1
    buckets.replace(path, bytes(data))
    with pytest.raises(CorruptError, match=f"{path} does not match its checksum"):
        ds.load(run)


def fails(number: int, text: str, path: Location, call: Any) -> StorageError:
    with pytest.raises(StorageError, match=text) as caught:
        call()
    assert (caught.value.errno, caught.value.filename) == (number, str(path))
    return caught.value


def test_a_bucket_that_is_gone_is_named(buckets: Buckets, run: str) -> None:
    path = Location(run.replace("bucket", "nobucket"))
    code = {"s3": "NoSuchBucket", "az": "ContainerNotFound"}[path.scheme]
    fails(0, f"look {path}: 404 Not Found, {code}", path, lambda: buckets.look(path))
    fails(errno.ENOENT, f"read {path}", path, lambda: buckets.read(path, 0, 1))
    with pytest.raises(StorageError, match=str(path)):
        ds.load(str(path))


def test_no_error_has_a_secret(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Location(run)
    for name in servers.ENDPOINTS:
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody listens there
    silent = Buckets(patience=0.1)
    with pytest.raises(StorageError, match=f"look {run}: HTTP error") as caught:
        silent.look(path)
    with pytest.raises(UncertainError, match=f"create {run}: HTTP error") as unsure:
        silent.create(path, b"1")
    for error in (caught.value, unsure.value):
        told = "".join(traceback.format_exception(error)).encode() + pickle.dumps(error)
        assert servers.SECRET.encode() not in told
    assert servers.SECRET not in repr(silent)
    with pytest.raises(TypeError, match="pickle"):
        pickle.dumps(silent)


@pytest.mark.parametrize("name", ["a%20b", "a\\b", "..", "n" * 201, "a\nb"])
def test_a_name_that_not_every_store_keeps_is_refused(buckets: Buckets, run: str, name: str) -> None:
    path = Location(run) / name / "x"
    fails(errno.EINVAL, "not every store keeps the name", path, lambda: buckets.create(path, b""))


@pytest.mark.parametrize(
    "address",
    [
        *("s3://", "s3:/", "s3://key:canary@bucket/run", "s3://canary@bucket/run", "s3://bucket:80/run"),
        *("gs://a canary/run", "az://bucket?sig=canary/run"),
        *("abfss://a@key:canary@account.dfs.core.windows.net/run", "abfs://a@/run"),
    ],
)
def test_an_address_without_the_name_of_a_bucket_is_refused(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    pytest.importorskip("obstore")
    monkeypatch.setattr(stores, "KINDS", dict(stores.KINDS))
    register(scheme_of(address), Buckets())
    for call in (ds.load, ds.Checkpointer, lambda path: ds.snapshot([from_state_dict("m", {"a": 1})], path)):
        with pytest.raises(StorageError, match=r"no bucket has this name\. Give [a-z0-9]+://BUCKET/NAME") as caught:
            call(address)
        assert "canary" not in f"{caught.value!r} {caught.value} {caught.value.filename}"


def test_a_forked_process_is_refused(buckets: Buckets, run: str) -> None:
    path = Location(run)
    buckets.look(path)
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            buckets.look(path)
        except BaseException as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with open(reader) as told:
        assert told.read() == f"open {run}: a forked process cannot use its parent's connections: spawn it"


def test_without_obstore_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    buckets_module.every_bucket.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'datastates\[stores\]'"):
        ds.load("gs://bucket/run")


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, True), ({"AWS_ALLOW_HTTP": "true"}, False), ({"AWS_UNSIGNED_PAYLOAD": "false"}, False)],
)
def test_what_goes_through_tls_is_not_hashed_for_its_signature(
    given: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ALLOW_HTTP", "AWS_UNSIGNED_PAYLOAD"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    client = Buckets()._client(Location("s3://bucket/run"))
    assert (client.config.get("unsigned_payload") == "true") is expected
