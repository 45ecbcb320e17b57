"""Systems that read checkpoints in a bucket, whose server the variables of the environment name.

A path that they are given names a checkpoint in the bucket, to which it was copied.
"""

from __future__ import annotations

import os
import shutil
import warnings
from abc import abstractmethod
from pathlib import Path

import obstore
from obstore.store import from_url
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader

import datastates as ds
from datastates.providers import from_state_dict
from peers.base import System
from states import State, plain

warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

BUCKET = "s3://bucket"


def address(path: Path) -> str:
    """The address of a checkpoint in the bucket."""
    return f"{BUCKET}/{path.parent.name}/{path.name}"


def _copy(path: Path) -> Path:
    """Move a folder to the bucket."""
    store = from_url(BUCKET)
    for file in path.iterdir():
        obstore.put(store, f"{path.parent.name}/{path.name}/{file.name}", file)
    shutil.rmtree(path)
    return path


class Datastates(System):
    """This package."""

    settings = "datastates.restore(providers, address), defaults; checksums on"

    def save(self, state: State) -> Path:
        path = self.next_path()
        ds.snapshot([from_state_dict(name, value) for name, value in state.items()], path).wait_committed()
        return _copy(path)

    def restore(self, path: Path, state: State) -> None:
        ds.restore([from_state_dict(name, value) for name, value in state.items()], address(path))


class _Dcp(System):
    @abstractmethod
    def _reader(self, path: Path) -> StorageReader: ...

    def save(self, state: State) -> Path:
        path = self.next_path()
        save(plain(state), storage_writer=FileSystemWriter(path), no_dist=True)
        return _copy(path)

    def restore(self, path: Path, state: State) -> None:
        load(plain(state), storage_reader=self._reader(path), no_dist=True)  # tensors and other values in place


class DcpWithS3fs(_Dcp):
    """DCP through fsspec. Of the caches of s3fs, the one that takes whole files is the fastest here."""

    settings = "FsspecReader; s3fs, default_cache_type=all"

    def _reader(self, path: Path) -> StorageReader:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

        return FsspecReader(address(path), default_cache_type="all")


class DcpWithS3torchconnector(_Dcp):
    """DCP with the reader of s3torchconnector, whose client is told the server."""

    settings = "S3StorageReader, defaults (dcp_optimized)"

    def _reader(self, path: Path) -> StorageReader:
        from s3torchconnector import S3ClientConfig
        from s3torchconnector._s3client import S3Client
        from s3torchconnector.dcp import S3StorageReader

        region = os.environ["AWS_REGION"]
        reader = S3StorageReader(region, address(path))
        reader.fs._client = S3Client(
            region,
            endpoint=os.environ["AWS_ENDPOINT_URL"],
            s3client_config=S3ClientConfig(force_path_style=True),
        )
        found: StorageReader = reader
        return found
