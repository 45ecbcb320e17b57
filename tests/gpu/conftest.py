"""GPU tests skip, and say so, where there is no GPU; those of several ranks can be told to run on the CPU."""

from __future__ import annotations

import os

import pytest

from datastates import _native

_ON_THE_CPU_TOO = ("test_dcp.py", "test_ranks.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if item.path.parent.name == "gpu"]
    for item in here:
        item.add_marker(pytest.mark.gpu)
        on_the_cpu = item.path.name in _ON_THE_CPU_TOO and os.environ.get("DATASTATES_TEST_RANKS") == "cpu"
        if _native.cuda_device_count() == 0 and not on_the_cpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine: GPU tests did NOT run"))
