"""Targets of exports: the end of the path's name decides whether a file or a folder is made, and of which format."""

from __future__ import annotations

import errno

from datastates.commit.names import PARTIAL
from datastates.storage import folders_of
from datastates.storage.location import Location

SAFETENSORS = ".safetensors"
"""The end of the name of a single safetensors file."""
TORCH = (".pt", ".pth", ".bin", ".ckpt")
"""The ends of the names of files that ``torch.load`` opens, by PyTorch's and its trainers' conventions."""

INSIDE = "export"
"""The name before ``.partial-`` of an export's partial directory inside a folder."""


def is_torch(target: Location) -> bool:
    """Whether a target is a file for ``torch.load``, by the end of its name."""
    return target.name.endswith(TORCH)


def is_file(target: Location) -> bool:
    """Whether a target is a single file. Any other is a folder of safetensors files."""
    return target.name.endswith((SAFETENSORS, *TORCH))


def place_of_partial(target: Location) -> Location:
    """The path whose partial directory an export writes into: inside a folder that is there, else beside the target.

    A folder that is there keeps its mode, its owner and whatever stands in it or is mounted on it. A link is followed.
    """
    return target / INSIDE if folders_of(target).is_folder(target) and not is_file(target) else target


def refuse_existing(target: Location) -> None:
    """Raise FileExistsError if the target of an export exists and is no empty folder.

    Partial directories of other exports in a folder do not count: their files do not have their names yet.
    """
    store = folders_of(target)
    if store.is_folder(target) and not is_file(target):
        if all((match := PARTIAL.match(name)) and match[1] == INSIDE for name in store.names(target)):
            return
        raise FileExistsError(errno.EEXIST, "the target of an export is not empty", str(target))
    if store.exists(target, follow=False):
        raise FileExistsError(errno.EEXIST, "the target of an export exists", str(target))
