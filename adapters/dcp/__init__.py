"""torch.distributed.checkpoint on this package's engine: a storage writer and reader, a stager, and ``async_save``."""

import torch.distributed.checkpoint.filesystem as _filesystem

if not hasattr(_filesystem, "CURRENT_DCP_VERSION"):
    raise ImportError("datastates.adapters.dcp needs a later torch: it was tried with 2.11 and 2.13")

from datastates.adapters.dcp.reader import DataStatesStorageReader
from datastates.adapters.dcp.snapshots import async_save
from datastates.adapters.dcp.staging import DataStatesStager
from datastates.adapters.dcp.writer import DataStatesStorageWriter

__all__ = ["DataStatesStager", "DataStatesStorageReader", "DataStatesStorageWriter", "async_save"]
