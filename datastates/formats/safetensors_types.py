"""The element types of safetensors."""

from __future__ import annotations

TYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "complex64": "C64",
    "int64": "I64",
    "uint64": "U64",
    "float64": "F64",
}
"""The format's names of element types by torch's, of those that ``safetensors.torch`` reads."""

READ = {name: dtype for dtype, name in TYPES.items()} | {
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
"""Torch's names of element types by the format's, of those that are read."""
