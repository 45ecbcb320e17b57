"""Shared by all tests."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("DATASTATES_HOST_CACHE", "64MiB")


@pytest.fixture(scope="session", autouse=True)
def outside_the_sources(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Child processes run with -c or -m look in the working directory first: no sources there."""
    os.chdir(tmp_path_factory.mktemp("work"))
