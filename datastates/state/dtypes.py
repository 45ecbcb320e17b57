"""The element types that a container can hold: first torch's, by their torch names, then others of ml_dtypes.

``code`` numbers are part of the file format (``docs/format.md``): append, never renumber.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class DType:
    """One element type of arrays, with its names in torch, NumPy and the file format.

    Attributes:
        code: Its number in a container's index.
        name: torch's name for it, without the ``torch.`` prefix; for a type that torch lacks, ml_dtypes' name.
        itemsize: Bytes of an element.
        storage: torch's legacy storage class, used in ``data.pkl``. None for the newer types, which torch writes as an
            untyped storage and a dtype.
        numpy: NumPy's type string, or the name of a type of ml_dtypes. None where neither has the type.
        safetensors: The name in safetensors' headers of a type that ``safetensors.torch`` reads; else None.
        in_torch: Whether torch has tensors of the type. In ``data.pkl`` an array of another type is its bytes, as
            ``uint8``.
    """

    code: int
    name: str
    itemsize: int
    storage: str | None
    numpy: str | None
    safetensors: str | None = None
    in_torch: bool = True


ALL = (
    DType(0, "float64", 8, "DoubleStorage", "<f8", "F64"),
    DType(1, "float32", 4, "FloatStorage", "<f4", "F32"),
    DType(2, "float16", 2, "HalfStorage", "<f2", "F16"),
    DType(3, "bfloat16", 2, "BFloat16Storage", "bfloat16", "BF16"),
    DType(4, "int64", 8, "LongStorage", "<i8", "I64"),
    DType(5, "int32", 4, "IntStorage", "<i4", "I32"),
    DType(6, "int16", 2, "ShortStorage", "<i2", "I16"),
    DType(7, "int8", 1, "CharStorage", "|i1", "I8"),
    DType(8, "uint8", 1, "ByteStorage", "|u1", "U8"),
    DType(9, "bool", 1, "BoolStorage", "|b1", "BOOL"),
    DType(10, "complex64", 8, "ComplexFloatStorage", "<c8", "C64"),
    DType(11, "complex128", 16, "ComplexDoubleStorage", "<c16"),
    DType(12, "uint16", 2, None, "<u2", "U16"),
    DType(13, "uint32", 4, None, "<u4", "U32"),
    DType(14, "uint64", 8, None, "<u8", "U64"),
    DType(15, "complex32", 4, None, None),
    DType(16, "float8_e4m3fn", 1, None, "float8_e4m3fn", "F8_E4M3"),
    DType(17, "float8_e5m2", 1, None, "float8_e5m2", "F8_E5M2"),
    DType(18, "float8_e4m3fnuz", 1, None, "float8_e4m3fnuz", "F8_E4M3FNUZ"),
    DType(19, "float8_e5m2fnuz", 1, None, "float8_e5m2fnuz", "F8_E5M2FNUZ"),
    DType(20, "float8_e8m0fnu", 1, None, "float8_e8m0fnu", "F8_E8M0"),
    DType(21, "float4_e2m1fn_x2", 1, None, None),
    DType(22, "bits8", 1, None, None),
    DType(23, "bits16", 2, None, None),
    DType(24, "bits1x8", 1, None, None),
    DType(25, "bits2x4", 1, None, None),
    DType(26, "bits4x2", 1, None, None),
    # an element of these types takes a byte in ml_dtypes' arrays, although it has fewer bits
    DType(27, "int4", 1, None, "int4", in_torch=False),
    DType(28, "uint4", 1, None, "uint4", in_torch=False),
    DType(29, "int2", 1, None, "int2", in_torch=False),
    DType(30, "uint2", 1, None, "uint2", in_torch=False),
    DType(31, "float8_e3m4", 1, None, "float8_e3m4", in_torch=False),
    DType(32, "float8_e4m3", 1, None, "float8_e4m3", in_torch=False),
    DType(33, "float8_e4m3b11fnuz", 1, None, "float8_e4m3b11fnuz", in_torch=False),
    DType(34, "float4_e2m1fn", 1, None, "float4_e2m1fn", in_torch=False),
)

BY_NAME = {d.name: d for d in ALL}
BY_STORAGE = {d.storage: d for d in ALL if d.storage is not None}
BY_NUMPY = {d.numpy: d for d in ALL if d.numpy is not None}
FRACTIONS = {d.name for d in ALL if d.name.startswith(("float", "bfloat", "complex"))}
"""The names of the types whose elements may be fractions."""
FLOATS = {d.name for d in ALL if d.in_torch and d.numpy and d.name.startswith(("float", "bfloat"))} - {"float8_e8m0fnu"}
"""The names of the types that a restore converts into each other; the one left out has powers of two only."""
SAFETENSORS = {d.name: d.safetensors for d in ALL if d.safetensors is not None}
TORCH = {d.name for d in ALL if d.in_torch}


def pickled(dtype: DType) -> DType:
    """The element type under which ``data.pkl`` has an array of ``dtype``: ``uint8`` if torch lacks the type."""
    return dtype if dtype.in_torch else BY_NAME["uint8"]


def described(value: Any) -> str:
    """The class of a value that is no plain memory, for a message, with the form of an array or tensor."""
    text = type(value).__name__
    if hasattr(value, "layout"):
        text += f", {value.layout} on {value.device}"
    if isinstance(value, np.ndarray):
        text += f" of type {value.dtype}"
        if not value.dtype.isnative:
            text += ", in the other byte order (array.astype(array.dtype.newbyteorder('=')) has this machine's)"
    return text
