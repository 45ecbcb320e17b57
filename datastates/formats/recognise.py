"""Finds the format of a path. A checkpoint of this package, or a directory of them, is found first."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NoReturn

from datastates._base import log
from datastates.commit import directories, health, newest
from datastates.commit.names import BESIDE, SAVING
from datastates.commit.tiers import tier_of
from datastates.errors import CheckpointNotFoundError, DatastatesError, FormatError, StorageError
from datastates.formats import dcp, deepspeed, hugging_face, own, safetensors_file, torch_file
from datastates.formats.composite import LIGHTNING, MEGATRON, TRAINER
from datastates.formats.format import Format, Opened
from datastates.formats.seen import Seen
from datastates.storage import Entry, store_of
from datastates.storage.location import Location, PathLike

_FOREIGN: tuple[Format, ...] = (
    MEGATRON,
    dcp,
    TRAINER,
    deepspeed,
    hugging_face,
    LIGHTNING,
    torch_file,
    safetensors_file,
)
"""The formats of others. The first that recognises a path is taken."""


def recognise(seen: Seen) -> Format | None:
    """The format of a file or a folder that is one checkpoint; None for one that no format recognises.

    A directory of this package's checkpoints is none of another format, whatever else lies in it.

    Raises:
        StorageError: It cannot be read.
    """
    if own.recognises(seen):
        return own
    return None if seen.is_root else next((one for one in _FOREIGN if one.recognises(seen)), None)


_TELL_STEP: tuple[Format, ...] = (own, TRAINER, deepspeed, LIGHTNING)
"""The formats that tell the step."""


@dataclass(frozen=True, slots=True)
class Other:
    """A checkpoint as its files describe it from outside.

    Attributes:
        format: The name of its format.
        step: The step; None if it does not tell, or cannot be read.
        changed: When the last of its files was changed, in nanoseconds of Unix time.
        nbytes: Length of all of its files together.
    """

    format: str
    step: int | None
    changed: int
    nbytes: int


def describe(path: Location, kind: Format) -> Other:
    """Describe a checkpoint of a format; raises StorageError if its files cannot be listed."""
    step = None
    if kind in _TELL_STEP:
        with contextlib.suppress(DatastatesError):  # verify tells what is wrong with it
            step = kind.open(path).tensors.step
    entries = _entries(path)
    changed = max((entry.changed for entry in entries), default=0)
    return Other(kind.NAME, step, changed, sum(entry.nbytes for entry in entries))


def _entries(path: Location) -> list[Entry]:
    """The entry of a file, or of each file in a folder and below."""
    if (entry := store_of(path).look(path)) is not None and entry.kind == "file":
        return [entry]
    return [*store_of(path).entries(path, deep=True).values()]


def others(root: Location, names: Iterable[str]) -> dict[str, Format]:
    """Those of the names in a directory that are checkpoints of any format, each with its format.

    An entry that cannot be read is left out.
    """
    found = {}
    for name in sorted(names):
        if BESIDE.match(name) or SAVING.match(name):
            continue
        with contextlib.suppress(StorageError):
            if (kind := recognise(Seen(root / name))) is not None:
                found[name] = kind
    return found


def newest_other(root: Location) -> tuple[Location, str] | None:
    """Path and format's name of the newest checkpoint in ``root`` that is not named ``step-N``; None without one."""
    with contextlib.suppress(OSError):  # it only helps to find one
        known = {one.name for one in directories.steps(root)}
        found = others(root, {*store_of(root).names(root)} - known)
        looks = {name: store_of(root).look(root / name) for name in found}
        if ages := [(look.changed, name) for name, look in looks.items() if look is not None]:
            name = max(ages)[1]
            return root / name, found[name].NAME
    return None


def refuse_absence(path: Location, step: int | None) -> NoReturn:
    """As :func:`datastates.commit.newest.refuse_absence`; the message also names a checkpoint under another name."""
    try:
        newest.refuse_absence(path, step)
    except CheckpointNotFoundError as error:
        raise _with_other(error, path) from None


def _with_other(error: CheckpointNotFoundError, path: Location) -> CheckpointNotFoundError:
    if Seen(path).is_root or (there := newest_other(path)) is None:
        return error
    return CheckpointNotFoundError(f"{error}; {there[0]} is {there[1]}: give that path")


def other(seen: Seen) -> Format | None:
    """The format of a path, if it is not this package's.

    Raises:
        FormatError: The path is of a format that is not read, but known; the message names what reads it.
        StorageError: It cannot be read.
    """
    kind = recognise(seen)
    if kind is None and not seen.is_root and (what := what_is(seen)) is not None:
        raise FormatError(f"{seen.path} is {what}")
    return None if kind is own else kind


@contextlib.contextmanager
def kept(path: Location, step: int | None = None) -> Iterator[tuple[Format, Location]]:
    """Yield the format and the path of the checkpoint that a path means.

    A checkpoint of this package, be it ``path`` or the newest in it or the newest of ``step``, is kept from deletion
    until the block ends.

    Raises:
        CheckpointNotFoundError: There is no checkpoint, or none of that step.
        FormatError: The path is of a format that is not read; the message names it.
        StorageError: The path cannot be read.
    """
    seen = Seen(path)
    found = other(seen) or own
    if found is not own or seen.is_file:
        yield found, path
        return
    place = newest.given(path, is_checkpoint=seen.has_manifest)
    with contextlib.ExitStack() as reading:
        try:
            chosen = place.tier.keep(lambda: newest.find(place, step), reading)
        except CheckpointNotFoundError as error:
            raise _with_other(error, path) from None
        assert chosen is not None
        yield own, chosen


IN_PYTHON = "take it with step={step}"
"""Advice to callers in Python on how to take another step."""


@contextlib.contextmanager
def opened(given: PathLike, step: int | None, advice: str = IN_PYTHON) -> Iterator[Opened]:
    """Open the checkpoint that a path means, of any format, protected from deletion; raises as :func:`kept`.

    If the newest checkpoint of a directory is damaged, the error names an older one that looks whole, and ``advice``
    tells how to take it.
    """
    path = Location.of(given)
    with (
        kept(path, step) as (kind, found),
        health.advice(tier_of(path), found, advice if found != path and step is None else None),
    ):
        yield of_step(kind.open(found), found, step)


def of_step(opened: Opened, path: Location, step: int | None) -> Opened:
    """Return ``opened``; raises CheckpointNotFoundError if a ``step`` is wanted and it is of another step."""
    if step is not None and (saved := opened.tensors.step) != step:
        of = "no step that it names" if saved is None else f"step {saved}"
        raise CheckpointNotFoundError(f"{path} is of {of}, not of step {step}")
    return opened


def meeting_place(seen: Seen) -> Location:
    """The directory where ranks meet to restore from a path: beside a checkpoint, never in it."""
    return seen.path if seen.is_folder and recognise(seen) is None else seen.path.parent


def refuse_checkpoint(directory: Location) -> None:
    """Raise ValueError if a directory for checkpoints is itself a checkpoint: restore would find none saved in it."""
    seen = Seen(directory)
    if seen.has_manifest:
        raise ValueError(
            f"directory: {directory} is itself a checkpoint: give the directory that it lies in, or use "
            "datastates.restore"
        )
    if (kind := recognise(seen)) is not None and kind is not own:
        raise ValueError(
            f"directory: {directory} is {kind.NAME}: give another directory for new checkpoints, and restore from this "
            f"one by datastates.restore(providers, {str(directory)!r})"
        )


def warn_of_other(directory: Location) -> None:
    """If a directory has no checkpoint of a training run, log the name of another checkpoint in it."""
    if (there := newest_other(directory)) is not None:
        path, what = there
        log.warning(
            "%s has no checkpoint of this training run. %s is %s: datastates.restore(providers, %r) restores from it",
            *(directory, path, what, str(path)),
        )


_ZIP = b"PK\3\4"
_KERAS = (b"model.weights.h5", b"metadata.json", b"config.json")
"""Names of files in an archive of Keras; one of them is the first."""
_TAR, _TAR_AT = b"ustar", 257
_TABLE = (0xDB4775248B80FB57).to_bytes(8, "little")
"""The end of a table of TensorFlow, such as the index of a checkpoint."""
_ARRAY = "an array of NumPy (.npy), or several of them, as Equinox writes them: numpy.load reads the first, and "
_ARRAY += "equinox.tree_deserialise_leaves all"
_TENSORFLOW = "a checkpoint of TensorFlow: tf.train.load_checkpoint reads it, given its path without "
_BEGINNINGS: tuple[tuple[bytes, int, str], ...] = (
    (b"\x93NUMPY", 0, _ARRAY),
    (b"\x89HDF\r\n\x1a\n", 0, "a file of HDF5, as of Keras (.h5): h5py reads it, and keras.saving.load_model a model"),
    (b"GGUF", 0, "a GGUF file, as of llama.cpp: gguf.GGUFReader reads it"),
    (b"TFL3", 4, "a model of TensorFlow Lite: its interpreter reads it"),
    (b"\x1f\x8b", 0, "compressed by gzip: decompress it first"),
    (b"\x28\xb5\x2f\xfd", 0, "compressed by zstd: decompress it first"),
    (b"\xfd7zXZ\0", 0, "compressed by xz: decompress it first"),
    (b"BZh", 0, "compressed by bzip2: decompress it first"),
)
"""For a file: a text, its place, and the end of a sentence about the files that have it there."""
_SUFFIXES = {
    ".onnx": "a model of ONNX: onnx.load reads it",
    ".msgpack": "a file of MessagePack, as of Flax: flax.serialization.msgpack_restore reads it",
    ".eqx": "a file of Equinox: equinox.tree_deserialise_leaves reads it",
}
"""For files that do not begin in one way. They are asked for after all others."""
_FOLDERS = {
    "saved_model.pb": "a SavedModel of TensorFlow: tf.saved_model.load reads it",
    "manifest.ocdbt": "a checkpoint of Orbax: orbax.checkpoint reads it",
    "_CHECKPOINT_METADATA": "a checkpoint of Orbax: orbax.checkpoint reads it",
}
"""For a folder: a name in it, and the end of a sentence about the folders that have it."""


def what_is(seen: Seen) -> str | None:
    """The end of a sentence that names the format of a file or folder, and what reads it; None if it is not known.

    It is of no format that this package reads. Raises StorageError if it cannot be read.
    """
    if seen.is_file:
        return _what_file(seen)
    if "checkpoint" in seen.names and any(name.endswith(".index") for name in seen.names):
        return "a folder of checkpoints of TensorFlow: tf.train.latest_checkpoint finds the newest"
    return next((what for name, what in _FOLDERS.items() if name in seen.names), None)


def _what_file(seen: Seen) -> str | None:
    path, head = seen.path, seen.beginning
    for text, at, what in _BEGINNINGS:
        if head[at:].startswith(text):
            return what
    if head.startswith(_ZIP):
        return _what_archive(head)
    if head[_TAR_AT:].startswith(_TAR):
        # torch has written its members in this order
        if head.startswith((b"sys_info\0", b"pickle\0", b"tensors\0", b"storages\0")):
            return "a file of torch.save from before torch 0.1.10: torch.load(weights_only=False) reads it"
        return "a tar archive: unpack it first"
    if ".data-" in path.name or seen.ending(len(_TABLE)) == _TABLE:
        return _TENSORFLOW + "'.index' or '.data-…'"
    if torch_file.is_plain_pickle(seen):
        return "a plain pickle, not a file of torch.save: only pickle.load reads it"
    return _SUFFIXES.get(path.suffix)


def _what_archive(head: bytes) -> str | None:
    name = head[30 : 30 + int.from_bytes(head[26:28], "little")]
    if name.endswith(b".npy"):
        return "an archive of NumPy's arrays (.npz): numpy.load reads it"
    return "a model of Keras (.keras): keras.saving.load_model reads it" if name in _KERAS else None
