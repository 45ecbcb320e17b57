"""The newest version of each framework that this package was tried with. A newer one gets one warning, no error."""

from __future__ import annotations

import importlib.metadata
import re
from functools import cache

from datastates._base import log

NEWEST = {
    "accelerate": "1.15.0",
    "deepspeed": "0.19.8",
    "lightning": "2.6.6",
    "megatron-core": "0.19.1",
    "torch": "2.14.1",
    "torchtitan": "0.3.0",
    "transformers": "5.24.0",
}
"""The newest tried version of each package, by the package's name."""


@cache
def warn_of_untried(package: str) -> None:
    """Log a warning, once in a process, if the installed version of a package is newer than the newest one tried."""
    try:
        installed = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # it may go by another name, as pytorch_lightning does
        return
    if _release(installed) > _release(NEWEST[package]):
        text = "%s %s has not been tried with this package: the newest version that has is %s"
        log.warning(text, package, installed, NEWEST[package])


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a version, without the marks of a preview or a build."""
    return tuple(map(int, re.findall("[0-9]+", re.split(r"[^0-9.]", version, maxsplit=1)[0])))
