"""GPU tests skip, and say so, where there is no GPU."""

from __future__ import annotations

import pytest

from datastates import _native


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if item.path.parent.name == "gpu"]
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if _native.cuda_device_count() == 0:
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine: GPU tests did NOT run"))
