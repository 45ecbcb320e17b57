"""Stores of files: their contract, and the store of file systems.

The system calls of the Python code on a checkpoint's files are here. The native core opens containers itself.
"""

from datastates.storage.location import Location
from datastates.storage.store import Entry, Lock, Store, Writer
from datastates.storage.stores import store_of

__all__ = ["Entry", "Location", "Lock", "Store", "Writer", "store_of"]
