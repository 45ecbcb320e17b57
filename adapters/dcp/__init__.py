"""torch.distributed.checkpoint with this package's engine: storage writer and reader, and ``async_save``."""

from datastates.adapters.dcp.load.reader import DataStatesStorageReader
from datastates.adapters.dcp.save.async_save import async_save
from datastates.adapters.dcp.save.writer import DataStatesStorageWriter

__all__ = ["DataStatesStorageReader", "DataStatesStorageWriter", "async_save"]
