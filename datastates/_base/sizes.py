"""Sizes and alignments of a container file's layout, in bytes."""

from __future__ import annotations

PAGE = 4096
"""Alignment in bytes of a large record's data, and of every extent."""
SMALL = 64
"""Alignment in bytes of a small record's data."""
LARGE_RECORD = 64 * 1024
"""Smallest size of a large record in bytes."""
CHUNK = 256 * 1024
"""Bytes under one checksum. A chunk of this size stays in a core's L2 cache between its copy and its checksum."""
DESCRIPTOR = 24
"""Bytes of the zip64 data descriptor after each record: signature, CRC-32 at +4, and two sizes of 8 bytes."""
DESCRIPTOR_CRC = 4
"""Offset of the CRC-32 in the descriptor."""
