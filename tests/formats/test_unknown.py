"""Files and folders of other tools that are not read: the error names the format, and what reads it."""

from __future__ import annotations

import gzip
import io
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import datastates as ds
from datastates.cli import commands
from datastates.errors import FormatError
from datastates.providers import from_state_dict


def _npz(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, w=np.ones(3))


def _npy(path: Path) -> None:
    with path.open("wb") as file:  # as Equinox writes the leaves of a tree
        for _ in range(2):
            np.save(file, np.ones(3))


def _keras(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("metadata.json", "config.json", "model.weights.h5"):
            archive.writestr(name, b"{}")


def _tar(*names: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        with tarfile.open(path, "w") as archive:
            for name in names:
                archive.addfile(tarfile.TarInfo(name), io.BytesIO())

    return make


def _holding(*names: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.mkdir()
        for name in names:
            (path / name).touch()

    return make


MADE: dict[str, tuple[Callable[[Path], object], str]] = {
    "w.npz": (_npz, r"NumPy's arrays \(\.npz\): numpy\.load"),
    "w.npy": (_npy, "numpy.load reads the first, and equinox.tree_deserialise_leaves all"),
    "model.h5": (lambda p: p.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100)), "HDF5.*h5py"),
    "model.keras": (_keras, "keras.saving.load_model"),
    "model.gguf": (lambda p: p.write_bytes(b"GGUF" + bytes(100)), "gguf.GGUFReader"),
    "model.onnx": (lambda p: p.write_bytes(b"\x08\x08\x12\x07pytorch" + bytes(100)), "onnx.load"),
    "model.tflite": (lambda p: p.write_bytes(b"\x1c\0\0\0TFL3" + bytes(100)), "TensorFlow Lite"),
    "ckpt-1.index": (lambda p: p.write_bytes(bytes(40) + b"\x57\xfb\x80\x8b\x24\x75\x47\xdb"), "tf.train.load_ch"),
    "ckpt-1.data-00000-of-00001": (lambda p: p.write_bytes(np.ones(9).tobytes()), "tf.train.load_checkpoint"),
    "model.msgpack": (lambda p: p.write_bytes(b"\x81\xa6params\x80"), "flax.serialization.msgpack_restore"),
    "model.eqx": (lambda p: p.write_bytes(b'{"width": 3}\n' + bytes(100)), "equinox.tree_deserialise_leaves"),
    "old.pt": (_tar("sys_info", "pickle", "tensors", "storages"), r"0\.1\.10.*torch\.load\(weights_only=False\)"),
    "model.nemo": (_tar("weights.ckpt"), "a tar archive: unpack it"),
    "w.pt.gz": (lambda p: p.write_bytes(gzip.compress(b"abc")), "gzip: decompress"),
    "w.pkl": (lambda p: p.write_bytes(pickle.dumps({"w": 1})), "pickle.load"),
    "saved_model": (_holding("saved_model.pb"), "tf.saved_model.load"),
    "tf": (_holding("checkpoint", "ckpt-1.index"), "tf.train.latest_checkpoint"),
    "orbax": (_holding("_CHECKPOINT_METADATA"), "orbax.checkpoint"),
}


@pytest.mark.parametrize("name", MADE)
def test_it_is_named_whatever_is_called(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, told = MADE[name]
    make(tmp_path / name)
    path, state = tmp_path / name, {"w": np.ones(3)}
    calls: list[Callable[[], object]] = [
        lambda: ds.load(path),
        lambda: ds.open(path),
        lambda: ds.load(path, like={"m": state}),
        lambda: ds.restore([from_state_dict("m", state)], path),
        lambda: ds.compare([from_state_dict("m", state)], path),
        lambda: ds.export(path, tmp_path / "out.safetensors"),
    ]
    for call in calls:
        with pytest.raises(FormatError, match=f"{name} is .*{told}"):
            call()
    for command in ("inspect", "verify"):
        assert commands.main([command, str(path)]) == 1
        assert f"{name} is " in capsys.readouterr().err
    if path.is_file():
        assert commands.main(["ls", str(path)]) == 2
        assert f"{name} is " in capsys.readouterr().err


def test_a_directory_of_checkpoints_may_hold_such_files(tmp_path: Path) -> None:
    (tmp_path / "saved_model.pb").touch()
    with ds.Checkpointer(tmp_path) as checkpointer:
        checkpointer.snapshot([from_state_dict("m", {"w": np.ones(3)})], step=1).wait_committed()
    assert ds.load(tmp_path)["m"]["w"].tolist() == [1, 1, 1]
