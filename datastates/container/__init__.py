"""The container file that each rank writes: ZIP64 framing, index, ``data.pkl``, checksums and digests."""

from datastates.container.checksums import crc32
from datastates.container.file import Container, open_container
from datastates.container.index import Index
from datastates.container.pickle_reader import loads
from datastates.container.pickle_writer import dumps
from datastates.container.table import Row, ShardTable

__all__ = ["Container", "Index", "Row", "ShardTable", "crc32", "dumps", "loads", "open_container"]
