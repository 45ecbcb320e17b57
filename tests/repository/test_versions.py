"""The versions that are asked for, tried, told of and named in docs/ are those that `make check-versions` installs."""

from __future__ import annotations

import re
from pathlib import Path

from datastates.adapters.shared import tried

ROOT = Path(__file__).parents[2]
PINNED = re.compile(r"""^ *"?([A-Za-z0-9_-]+)==([0-9.]+)""", re.MULTILINE)


def pinned(path: str) -> dict[str, str]:
    """The versions that a file asks for by ``==`` at the beginning of a line, by package."""
    return dict(PINNED.findall((ROOT / path).read_text()))


OLDEST, NEWEST = pinned(".ci/oldest.txt"), pinned(".ci/newest.txt")
ALONE = dict(re.findall(r"\b(torch|torchtitan)==([0-9.]+[0-9])", (ROOT / "Makefile").read_text()))


def is_newer(version: str, than: str) -> bool:
    return tried._release(version) > tried._release(than)


def test_the_oldest_versions_are_those_that_are_asked_for() -> None:
    floors = re.findall(r'"([a-z_-]+)>=([0-9.]+)"', (ROOT / "pyproject.toml").read_text())
    asked = {(package, floor) for package, floor in floors if package in OLDEST}
    assert {package for package, _ in asked} >= set(tried.NEWEST) - {"torchtitan"}
    for package, floor in asked:
        assert re.fullmatch(rf"{re.escape(floor)}(\.0)*", OLDEST[package]), package


def test_a_warning_begins_behind_the_newest_versions() -> None:
    # PyPI has no later Megatron-Core: docs/megatron.md says which were run from their sources
    known = {**ALONE, **NEWEST, "megatron-core": "0.19.1"}
    assert {name: known[name] for name in tried.NEWEST} == tried.NEWEST


def test_what_the_tests_install_is_not_newer_than_what_was_tried() -> None:
    for package, version in {**pinned("pyproject.toml"), **ALONE}.items():
        assert not is_newer(version, {**ALONE, **NEWEST}.get(package, version)), package


def test_the_page_names_the_oldest_and_the_newest_versions() -> None:
    page = (ROOT / "docs/frameworks.md").read_text()
    rows = {
        name: (old, new) for name, old, new in re.findall(r"^\| ([a-z-]+) \| ([0-9.]+) \| ([0-9.]+) \|$", page, re.M)
    }
    assert set(rows) >= set(tried.NEWEST) - {"torchtitan"}
    assert rows == {name: (OLDEST[name], NEWEST[name]) for name in rows}
