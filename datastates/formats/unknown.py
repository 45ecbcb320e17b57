"""Names files and folders of tools whose formats this package does not read, and what reads them."""

from __future__ import annotations

from datastates.formats import torch_file
from datastates.storage import store_of
from datastates.storage.location import Location
from datastates.storage.stores import reader

_HEAD = 1024
"""Bytes at the beginning of a file that are looked at."""
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


def what_is(path: Location) -> str | None:
    """The end of a sentence that names the format of a file or folder, and what reads it; None if it is not known.

    ``path`` is of no format that this package reads. Raises StorageError if it cannot be read.
    """
    store = store_of(path)
    if store.is_folder(path):
        names = set(store.names(path))
        if "checkpoint" in names and any(name.endswith(".index") for name in names):
            return "a folder of checkpoints of TensorFlow: tf.train.latest_checkpoint finds the newest"
        return next((what for name, what in _FOLDERS.items() if name in names), None)
    return _what_file(path) if store.is_file(path) else None


def _what_file(path: Location) -> str | None:
    head, nbytes = store_of(path).head(path, _HEAD), store_of(path).length(path)
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
    if ".data-" in path.name or (nbytes >= len(_TABLE) and reader(path)(nbytes - len(_TABLE), len(_TABLE)) == _TABLE):
        return _TENSORFLOW + "'.index' or '.data-…'"
    if torch_file.is_plain_pickle(path):
        return "a plain pickle, not a file of torch.save: only pickle.load reads it"
    return _SUFFIXES.get(path.suffix)


def _what_archive(head: bytes) -> str | None:
    name = head[30 : 30 + int.from_bytes(head[26:28], "little")]
    if name.endswith(b".npy"):
        return "an archive of NumPy's arrays (.npz): numpy.load reads it"
    return "a model of Keras (.keras): keras.saving.load_model reads it" if name in _KERAS else None
