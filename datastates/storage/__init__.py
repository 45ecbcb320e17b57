"""Stores of objects and of files: their contracts, and the store of file systems.

The system calls of the Python code on a checkpoint's files are here. The native core opens containers itself.
"""

from datastates.storage.folders import FileWriter, Folders, Lock
from datastates.storage.location import Location
from datastates.storage.objects import Entry, Store, Traits, Writer
from datastates.storage.stores import folders_of, register, store_of

__all__ = ["Entry", "FileWriter", "Folders", "Location", "Lock", "Store", "Traits", "Writer"]
__all__ += ["folders_of", "register", "store_of"]
