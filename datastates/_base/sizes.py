"""The sizes and alignments that a container file is laid out by, in bytes."""

from __future__ import annotations

PAGE = 4096
"""Alignment in bytes of a large record's data, and of every extent."""
SMALL = 64
"""Alignment in bytes of a small record's data."""
LARGE_RECORD = 64 * 1024
"""From this many bytes on a record is large."""
CHUNK = 256 * 1024
"""Bytes under one checksum: sized to stay in a core's L2 cache between the copy and the checksum."""
DESCRIPTOR = 24
"""Bytes of the zip64 data descriptor after each record: signature, CRC-32 at +4, and two sizes of 8 bytes."""
DESCRIPTOR_CRC = 4
"""Where in the descriptor the CRC-32 stands."""
