"""``datastates doctor`` says whether a store is fit to save in, and whether a bucket removes unfinished uploads."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import servers
from command import run_json
from memory_store import MemoryStore

from datastates.cli import main
from datastates.storage import Location, bucket_rules, register, stores
from datastates.storage.buckets import Buckets

ROOT = "mem://bucket/run"


class Overwriting(MemoryStore):
    def create(self, path: Location, data: bytes) -> None:
        self.replace(path, data)


@pytest.fixture(autouse=True)
def _kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "KINDS", dict(stores.KINDS))


def test_a_store_that_overwrites_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    register("mem", store := Overwriting())
    assert main(["doctor", ROOT]) == 1
    assert "NOT OK     creates: mem://bucket/run: the store does not keep its promise" in capsys.readouterr().out
    assert store.entries(Location("mem://bucket"), deep=True) == {}


def test_a_store_that_keeps_its_promise(capsys: pytest.CaptureFixture[str]) -> None:
    register("mem", store := MemoryStore())
    assert main(["doctor", ROOT]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["ok", "ok", "not"]
    assert store.entries(Location("mem://bucket"), deep=True) == {}


def test_a_folder_is_no_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path)]) == 2
    assert "is no address of a store" in capsys.readouterr().err


@pytest.fixture
def moto(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    pytest.importorskip("obstore")
    pytest.importorskip("moto")
    with servers.server("moto", tmp_path) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        register("s3", Buckets(patience=1))
        yield importlib.import_module("boto3").client("s3")


@pytest.mark.long
@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ([], False),
        ([{"Filter": {"Prefix": ""}, "Days": 3}], True),
        ([{"Filter": {"Prefix": "ru"}, "Days": 3}], True),
        ([{"Filter": {"Prefix": "other/"}, "Days": 3}], False),
        ([{"Filter": {"Prefix": ""}, "Days": 3, "Status": "Disabled"}], False),
    ],
)
def test_a_rule_for_unfinished_uploads_is_found(
    moto: Any, rules: list[dict[str, Any]], expected: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    made = [
        {
            "ID": f"{number}",
            "Status": rule.get("Status", "Enabled"),
            "Filter": rule["Filter"],
            "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": rule["Days"]},
        }
        for number, rule in enumerate(rules)
    ]
    if made:
        moto.put_bucket_lifecycle_configuration(Bucket="bucket", LifecycleConfiguration={"Rules": made})
    status, told = run_json(capsys, "doctor", "s3://bucket/run")
    assert told["unfinished uploads"]["ok"] is expected
    assert status == (0 if expected else 1)
    assert "3 days" in told["unfinished uploads"]["text"] or not expected


def test_a_bucket_that_is_gone_is_named(moto: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "s3://gone/run"]) == 1
    told = "".join(capsys.readouterr())
    assert "s3://gone" in told
    assert servers.SECRET not in told


def test_without_boto3_the_rule_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_rules.importlib.util, "find_spec", lambda name: None)
    found = bucket_rules.of_unfinished_uploads(Location("s3://bucket/run"))
    assert found.is_there is None
    assert "pip install boto3" in found.text
