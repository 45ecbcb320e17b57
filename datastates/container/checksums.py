"""The checksums of the container format, CRC-32, computed by the native core."""

from datastates._native import Digester, crc32, crc32_combine, crc32_shift

__all__ = ["Digester", "crc32", "crc32_combine", "crc32_shift"]
