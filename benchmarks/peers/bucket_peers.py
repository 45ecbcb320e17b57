"""Systems that save to a bucket and read from it. The variables of the environment name its server.

A path that they are given names a checkpoint in the bucket.
"""

from __future__ import annotations

import os
import warnings
from abc import abstractmethod
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

import datastates as ds
from datastates.providers import from_state_dict
from peers.base import System
from states import State, plain

warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

BUCKET = "s3://bucket"


def address(path: Path) -> str:
    """The address of a checkpoint in the bucket."""
    return f"{BUCKET}/{path.parent.name}/{path.name}"


class Datastates(System):
    """This package."""

    settings = "Checkpointer(address).snapshot(providers) until it is committed; restore(providers, address)"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._checkpointer = ds.Checkpointer(f"{BUCKET}/{directory.name}")

    def save(self, state: State) -> Path:
        providers = [from_state_dict(name, value) for name, value in state.items()]
        taken = self._checkpointer.snapshot(providers, step=next(self._numbers))
        taken.wait_committed()
        return self.directory / str(taken.path).rpartition("/")[2]

    def close(self) -> None:
        self._checkpointer.close()

    def restore(self, path: Path, state: State) -> None:
        ds.restore([from_state_dict(name, value) for name, value in state.items()], address(path))


class _Dcp(System):
    @abstractmethod
    def _reader(self, path: Path) -> StorageReader: ...

    @abstractmethod
    def _writer(self, path: Path) -> StorageWriter: ...

    def save(self, state: State) -> Path:
        path = self.next_path()
        save(plain(state), storage_writer=self._writer(path), no_dist=True)
        return path

    def restore(self, path: Path, state: State) -> None:
        load(plain(state), storage_reader=self._reader(path), no_dist=True)  # tensors and other values in place


class DcpWithS3fs(_Dcp):
    """DCP through fsspec. Of the caches of s3fs, the one that takes whole files is the fastest here."""

    settings = "FsspecWriter; FsspecReader, default_cache_type=all"

    def _writer(self, path: Path) -> StorageWriter:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        return FsspecWriter(address(path))

    def _reader(self, path: Path) -> StorageReader:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

        return FsspecReader(address(path), default_cache_type="all")


class DcpWithS3torchconnector(_Dcp):
    """DCP with the writer and the reader of s3torchconnector, whose client is told the server."""

    settings = "S3StorageWriter; S3StorageReader, defaults (dcp_optimized)"

    def _writer(self, path: Path) -> StorageWriter:
        from s3torchconnector.dcp import S3StorageWriter

        made: StorageWriter = self._told(S3StorageWriter(os.environ["AWS_REGION"], address(path)))
        return made

    def _reader(self, path: Path) -> StorageReader:
        from s3torchconnector.dcp import S3StorageReader

        made: StorageReader = self._told(S3StorageReader(os.environ["AWS_REGION"], address(path)))
        return made

    def _told(self, made: Any) -> Any:
        """A reader or a writer whose client knows the server."""
        from s3torchconnector import S3ClientConfig
        from s3torchconnector._s3client import S3Client

        made.fs._client = S3Client(
            os.environ["AWS_REGION"],
            endpoint=os.environ["AWS_ENDPOINT_URL"],
            s3client_config=S3ClientConfig(force_path_style=True),
        )
        return made
