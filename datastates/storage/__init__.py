"""Stores of files: their contract, and the store of file systems. Every system call on a checkpoint is here."""

from datastates.storage.location import Location
from datastates.storage.store import Entry, Lock, Store, Writer
from datastates.storage.stores import store_of

__all__ = ["Entry", "Location", "Lock", "Store", "Writer", "store_of"]
