"""torch.distributed.checkpoint on this package's engine: a storage writer and reader, a stager, and ``async_save``."""

from datastates.adapters.dcp.reader import DataStatesStorageReader
from datastates.adapters.dcp.snapshots import async_save
from datastates.adapters.dcp.staging import DataStatesStager
from datastates.adapters.dcp.writer import DataStatesStorageWriter

__all__ = ["DataStatesStager", "DataStatesStorageReader", "DataStatesStorageWriter", "async_save"]
