"""A data.pkl that attacks: it runs code, asks for memory or time, or reaches for what it was not given."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from datastates.container import pickle_writer
from datastates.state.shards import Shard

MARK, TUPLE, REDUCE, BUILD, NEWOBJ = b"(", b"t", b"R", b"b", b"\x81"
EMPTY, NONE = b")", b"N"


def pickled(body: bytes) -> bytes:
    return b"\x80\x02" + body + b"."


def newer(body: bytes) -> bytes:
    """As of protocol 4, where one byte puts a value into the memo."""
    return b"\x80\x04" + body + b"."


def call(module: str, name: str, *arguments: bytes) -> bytes:
    return f"c{module}\n{name}\n".encode() + MARK + b"".join(arguments) + TUPLE + REDUCE


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def integer(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def tuple_of(*items: bytes) -> bytes:
    return MARK + b"".join(items) + TUPLE


def byte_string(data: bytes) -> bytes:
    return call("_codecs", "encode", text(data.decode("latin1")), text("latin1"))


def laughs(levels: int) -> bytes:
    """A tuple that holds twice a tuple that holds twice …: a few bytes a level, and 2**levels leaves."""
    return b"K\x01" + b"".join(b"q" + bytes([100 + i]) + b"h" + bytes([100 + i]) + b"\x86" for i in range(levels))


# --- code

COMMAND = text("exit 3")

CODE: dict[str, bytes] = {
    "os.system": call("os", "system", COMMAND),
    "posix.system": call("posix", "system", COMMAND),
    "nt.system": call("nt", "system", COMMAND),
    "subprocess.Popen": call("subprocess", "Popen", COMMAND),
    "subprocess.Popen made anew": b"csubprocess\nPopen\n" + MARK + COMMAND + TUPLE + NEWOBJ,
    "builtins.eval": call("builtins", "eval", text("1")),
    "__builtin__.eval": call("__builtin__", "eval", text("1")),
    "__builtin__.execfile": call("__builtin__", "execfile", text("/dev/null")),
    "__builtin__.reduce": call("__builtin__", "reduce"),
    "builtins.exec": call("builtins", "exec", text("1")),
    "builtins.compile": call("builtins", "compile", text("1"), text(""), text("exec")),
    "builtins.getattr": call("builtins", "getattr", text(""), text("format")),
    "__builtin__.getattr": call("__builtin__", "getattr", text(""), text("format")),
    "builtins.__import__": call("builtins", "__import__", text("antigravity")),
    "builtins.open": call("builtins", "open", text("/dev/null")),
    "builtins.type": call("builtins", "type", text("T"), EMPTY, b"}"),
    "builtins.object": call("builtins", "object"),
    "builtins.map": call("builtins", "map"),
    "builtins.breakpoint": call("builtins", "breakpoint"),
    "an attribute of a safe class": call("builtins", "set.__class__"),
    "an attribute of a safe function": call("builtins", "set.__init__.__globals__"),
    "globals of our own functions": call("_codecs", "encode.__globals__"),
    "a class method": call("collections", "Counter.fromkeys", b"]"),
    "modules of our own modules": call(
        "datastates.container.pickle_writer", "importlib.import_module", text("antigravity")
    ),
    "our own loads": call("datastates.container.pickle_writer", "loads"),
    "pickle.loads": call("pickle", "loads"),
    "_pickle.loads": call("_pickle", "loads"),
    "marshal.loads": call("marshal", "loads"),
    "importlib.import_module": call("importlib", "import_module", text("antigravity")),
    "runpy.run_path": call("runpy", "run_path", text("/dev/null")),
    "pty.spawn": call("pty", "spawn", COMMAND),
    "timeit.timeit": call("timeit", "timeit", COMMAND),
    "webbrowser.open": call("webbrowser", "open", COMMAND),
    "shutil.rmtree": call("shutil", "rmtree", text("/nonexistent")),
    "pip._internal.main": call("pip._internal", "main"),
    "types.CodeType": call("types", "CodeType"),
    "types.FunctionType": call("types", "FunctionType"),
    "functools.partial": call("functools", "partial"),
    "operator.attrgetter": call("operator", "attrgetter", text("x")),
    "copyreg._reconstructor": call("copyreg", "_reconstructor"),
    "copy_reg._reconstructor": call("copy_reg", "_reconstructor"),
    "ctypes.CDLL": call("ctypes", "CDLL", NONE),
    "codecs.open": call("codecs", "open", text("/dev/null")),
    "_codecs.lookup": call("_codecs", "lookup", text("x")),
    "collections.namedtuple": call("collections", "namedtuple", text("x"), text("y")),
    "torch.load": call("torch", "load", text("/dev/null")),
    "torch.hub.load": call("torch.hub", "load"),
    "torch.storage._load_from_bytes": call("torch.storage", "_load_from_bytes", NONE),
    "torch._utils._import_dotted_name": call("torch._utils", "_import_dotted_name", text("os.system")),
    "torch._utils._rebuild_tensor": call("torch._utils", "_rebuild_tensor", NONE),
    "torch._utils._rebuild_wrapper_subclass": call("torch._utils", "_rebuild_wrapper_subclass", NONE),
    "torch.nn.Module": call("torch.nn", "Module"),
    "torch.Tensor": call("torch", "Tensor"),
    "ml_dtypes.bfloat16": call("ml_dtypes", "bfloat16", text("1")),
    "ml_dtypes.finfo": call("ml_dtypes", "finfo", text("f4")),
    "numpy.load": call("numpy", "load", text("/dev/null")),
    "numpy.fromfile": call("numpy", "fromfile", text("/dev/null")),
    "numpy.memmap": call("numpy", "memmap", text("/dev/null")),
    "numpy.ndarray.fromfile": call("numpy", "ndarray.tofile"),
    "numpy.testing runstring": call("numpy.testing._private.utils", "runstring", text("1"), b"}"),
    "a module that is not imported": call("antigravity", "fly"),
    "a name with a NUL": b"cos\x00\nsystem\n" + EMPTY + REDUCE,
    "an empty name": b"c\n\n" + EMPTY + REDUCE,
    "a name of invalid UTF-8": b"c\xff\xfe\n\xff\n" + EMPTY + REDUCE,
    "a relative name": call(".pickling", "os"),
    "a layout that is a function": call("torch.serialization", "_get_layout", text("torch._import_dotted_name"))
    + text("os.system")
    + b"\x85"
    + REDUCE
    + MARK
    + COMMAND
    + TUPLE
    + REDUCE,
    "a layout that is a module": call("torch.serialization", "_get_layout", text("torch.os")),
    "a layout that saves": call("torch.serialization", "_get_layout", text("torch.save")),
    "a layout that is private": call("torch.serialization", "_get_layout", text("torch._C")),
    "a layout that is a class": call("torch.serialization", "_get_layout", text("torch.Tensor")),
}
OPCODES: dict[str, bytes] = {
    "STACK_GLOBAL": text("os") + text("system") + b"\x93" + MARK + COMMAND + TUPLE + REDUCE,
    "STACK_GLOBAL with its own texts": b"\x8c\x02os\x8c\x06system\x93" + MARK + COMMAND + TUPLE + REDUCE,
    "INST": MARK + COMMAND + b"ios\nsystem\n",
    "INST of a safe class": MARK + b"ibuiltins\nset\n",
    "OBJ": MARK + b"cos\nsystem\n" + COMMAND + b"o",
    "EXT1": b"\x82\x01",
    "EXT2": b"\x83\x01\x00",
    "EXT4": b"\x84\x01\x00\x00\x00",
    "NEWOBJ_EX": b"cbuiltins\nset\n" + EMPTY + b"}\x92",
    "PERSID": b"Pstorage\n",
    "LONG4": b"\x8b\xff\xff\xff\x7f",
    "FLOAT": b"F1.0\n",
    "STRING": b"S'a'\n",
    "UNICODE": b"Va\n",
    "BINSTRING": b"T\xff\xff\xff\x7f",
    "BINBYTES": b"B\xff\xff\xff\xff",
    "BINBYTES8": b"\x8e" + b"\xff" * 8,
    "BINUNICODE8": b"\x8d" + b"\xff" * 7 + b"\x7f",
    "BYTEARRAY8": b"\x96" + b"\xff" * 7 + b"\x7f",
    "FRAME": b"\x95" + b"\xff" * 7 + b"\x7f" + NONE,
    "NEXT_BUFFER": b"\x97",
    "READONLY_BUFFER": NONE + b"\x98",
    "DUP": NONE + b"2",
    "DICT": MARK + b"d",
    "LIST": MARK + b"l",
    "GET": NONE + b"p0\ng0\n",
    "PUT": NONE + b"p0\n",
    "no opcode at all": b"\xfe",
}


@pytest.mark.long
@pytest.mark.parametrize("name", CODE)
def test_call_of_a_foreign_name_is_refused(refused: Any, name: str) -> None:
    assert refused("loads", data=pickled(CODE[name])).error in ("TrustError", "FormatError")


@pytest.mark.parametrize("name", OPCODES)
def test_opcode_of_another_dialect_is_refused(refused: Any, name: str) -> None:
    refused("loads", data=pickled(OPCODES[name]))


@pytest.mark.parametrize("name", ["os.system", "builtins.eval", "numpy.load", "__builtin__.getattr"])
@pytest.mark.parametrize("action", ["load", "restore_object", "restore_state"])
def test_checkpoint_that_runs_code_is_refused(refused: Any, forge: Any, name: str, action: str) -> None:
    outcome = refused(action, forge(pickled(CODE[name])))
    assert outcome.error == "TrustError"
    assert name.removeprefix("__builtin__.") in outcome.message


def test_trust_in_one_name_admits_no_other(refused: Any) -> None:
    refused("loads", data=pickled(CODE["os.system"]), trust=["os.path.join", "system", "os", "os.", "os.system2"])


# --- a pickle can change nothing but what it has made itself

CHANGES: dict[str, bytes] = {
    "an attribute of a safe class": b"ccollections\nCounter\n" + b"N}" + text("update") + b"K\x01s\x86" + BUILD,
    "attributes of a safe class": b"ccollections\nCounter\n" + b"}" + text("update") + b"K\x01s" + BUILD,
    "an attribute of a safe function": b"c_codecs\nencode\n" + b"N}" + text("__defaults__") + b")s\x86" + BUILD,
    "attributes of a safe function": b"c_codecs\nencode\n" + b"}" + text("x") + b"K\x01s" + BUILD,
    "an attribute of NumPy's function": b"cnumpy.core.multiarray\nscalar\n"
    + b"N}"
    + text("__doc__")
    + b")s\x86"
    + BUILD,
    "an attribute of a dtype of torch": b"ctorch\nfloat32\n" + b"}" + text("x") + b"K\x01s" + BUILD,
    "an element of a function": b"c_codecs\nencode\nK\x01K\x01s",
}


@pytest.mark.parametrize("name", CHANGES)
def test_change_of_what_the_pickle_did_not_make_is_refused(refused: Any, name: str) -> None:
    refused("loads", data=pickled(CHANGES[name]))


# --- memory

HUGE = integer(1 << 40)
RANGE = call("builtins", "range", HUGE)
STORAGE = MARK + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + HUGE + TUPLE + b"Q"
HOOKS = b"ccollections\nOrderedDict\n)R"


def tensor(offset: bytes, shape: bytes, stride: bytes, storage: bytes = STORAGE) -> bytes:
    return call("torch._utils", "_rebuild_tensor_v2", storage, offset, shape, stride, b"\x89", HOOKS)


def numpy_array(state: bytes) -> bytes:
    empty = call("numpy.core.multiarray", "_reconstruct", b"cnumpy\nndarray\n", b"K\x00\x85", byte_string(b"b"))
    return empty + state + BUILD


def dtype(code: str, state: bytes = b"") -> bytes:
    return call("numpy", "dtype", text(code), b"\x89", b"\x88") + (state + BUILD if state else b"")


def dtype_state(elsize: int, flags: int, *, names: bytes = NONE, fields: bytes = NONE, subdtype: bytes = NONE) -> bytes:
    return tuple_of(b"K\x03", text("|"), subdtype, names, fields, integer(elsize), integer(1), integer(flags))


def masked_array(shape: bytes, *, kind: bytes = b"cnumpy.ma\nMaskedArray\n") -> bytes:
    return call("numpy.ma.core", "_mareconstruct", kind, b"cnumpy\nndarray\n", shape, text("b"))


def masked_state(shape: tuple[int, ...], data: bytes, mask: bytes, fill: bytes = NONE) -> bytes:
    sizes = tuple_of(*map(integer, shape))
    return tuple_of(b"K\x01", sizes, dtype("u1"), b"\x89", byte_string(data), byte_string(mask), fill)


def array_state(shape: tuple[int, ...], kind: bytes, data: bytes) -> bytes:
    return tuple_of(b"K\x01", tuple_of(*map(integer, shape)), kind, b"\x89", data)


MEMORY: dict[str, bytes] = {
    "a text that is cut short": b"X\xff\xff\xff\xffabc",
    "a short text that is cut short": b"U\xffabc",
    "a number that is cut short": b"\x8a\xffabc",
    "a long number that is cut short": b"\x8b\xff\xff\xff\x7fabc",
    "a bytearray that is cut short": b"\x96" + struct.pack("<Q", 1 << 40) + b"abc",
    "a frame that is cut short": b"\x95" + struct.pack("<Q", 1 << 40) + NONE,
    "a NumPy array of less than its shape": call(
        "numpy.core.numeric", "_frombuffer", b"C\x01a", dtype("f8"), tuple_of(HUGE), text("C")
    ),
    "a NumPy array of objects from a buffer": call(
        "numpy.core.numeric", "_frombuffer", b"C\x08AAAAAAAA", dtype("O8"), tuple_of(b"K\x01"), text("C")
    ),
    "a NumPy array of a range": call("numpy.core.numeric", "_frombuffer", RANGE, dtype("u1"), RANGE, text("C")),
    "bytes of a range": call("builtins", "bytes", RANGE),
    "bytes of a length": call("builtins", "bytes", HUGE),
    "a bytearray of a length": call("builtins", "bytearray", HUGE),
    "a bytearray of a range": call("builtins", "bytearray", RANGE),
    "a set of a range": call("builtins", "set", RANGE),
    "a frozenset of a range": call("builtins", "frozenset", RANGE),
    "a counter of a range": call("collections", "Counter", RANGE),
    "a torch.Size of a range": call("torch", "Size", RANGE),
    "a tensor whose shape is a range": tensor(b"K\x00", RANGE, EMPTY),
    "a tensor whose strides are a range": tensor(b"K\x00", EMPTY, RANGE),
    "a list that is extended by a range": b"]" + RANGE + b"e",
    "a sparse tensor without its elements": call(
        "torch._utils",
        "_rebuild_sparse_tensor",
        call("torch.serialization", "_get_layout", text("torch.sparse_coo")),
        EMPTY,
    ),
    "a sparse tensor of ranges": call(
        "torch._utils",
        "_rebuild_sparse_tensor",
        call("torch.serialization", "_get_layout", text("torch.sparse_coo")),
        tuple_of(tuple_of(RANGE), RANGE, tuple_of(HUGE), b"\x89"),
    ),
    "a meta tensor of a range": call(
        "torch._utils", "_rebuild_meta_tensor_no_storage", b"ctorch\nfloat32\n", RANGE, RANGE, b"\x89"
    ),
    "a NumPy array of a shape": call("numpy", "ndarray", tuple_of(HUGE)),
    "a small NumPy array of a shape": call("numpy", "ndarray", tuple_of(b"K\x05")),
    "a NumPy array made anew": b"cnumpy\nndarray\n" + tuple_of(tuple_of(HUGE)) + NEWOBJ,
    "a small NumPy array made anew": b"cnumpy\nndarray\n" + tuple_of(tuple_of(b"K\x05")) + NEWOBJ,
    "a NumPy array rebuilt with a shape": call(
        "numpy.core.multiarray", "_reconstruct", b"cnumpy\nndarray\n", tuple_of(HUGE), byte_string(b"b")
    ),
    "a NumPy array with less data than its shape": numpy_array(array_state((1 << 40,), dtype("f8"), byte_string(b"x"))),
    "a NumPy array whose shape wraps around": numpy_array(
        array_state((1 << 32, 1 << 32), dtype("u1"), byte_string(b""))
    ),
    "a NumPy array of a negative shape": numpy_array(array_state((-1,), dtype("u1"), byte_string(b""))),
    "a NumPy array of objects that are not there": numpy_array(array_state((1 << 27,), dtype("O8"), b"]")),
    "a NumPy array of a few objects that are not there": numpy_array(array_state((1000,), dtype("O8"), b"]")),
    "a NumPy array of objects from bytes": numpy_array(array_state((1,), dtype("O8"), byte_string(b"A" * 8))),
    "a NumPy array of hidden objects": numpy_array(
        array_state(
            (1,),
            dtype(
                "V8",
                dtype_state(
                    8,
                    0,
                    names=tuple_of(text("a")),
                    fields=b"}" + text("a") + tuple_of(dtype("O8"), b"K\x00") + b"s",
                ),
            ),
            byte_string(b"A" * 8),
        )
    ),
    "a NumPy type with a field beyond its end": dtype(
        "V8",
        dtype_state(
            8, 0, names=tuple_of(text("a")), fields=b"}" + text("a") + tuple_of(dtype("f8"), integer(1 << 20)) + b"s"
        ),
    ),
    "a NumPy type with objects in its elements": dtype(
        "V8", dtype_state(8, 0, subdtype=tuple_of(dtype("O8"), tuple_of(b"K\x01")))
    ),
    "a NumPy type of objects that says it has none": dtype("O8", dtype_state(8, 0)),
    "a NumPy type of a negative size": dtype("V8", dtype_state(-8, 0)),
    "a NumPy scalar of another size": call("numpy.core.multiarray", "scalar", dtype("V2000000000"), byte_string(b"x")),
    "a NumPy scalar of objects": call("numpy.core.multiarray", "scalar", dtype("O8"), byte_string(b"A" * 8)),
    "a masked array rebuilt with a shape": masked_array(tuple_of(HUGE)),
    "a masked array of a class of arrays": masked_array(b"K\x00\x85", kind=b"cnumpy\nndarray\n"),
    "a masked array with a short mask": masked_array(b"K\x00\x85") + masked_state((2,), b"ab", b"\x00") + BUILD,
    "a masked array without data": masked_array(b"K\x00\x85") + masked_state((2,), b"", b"\x00\x00") + BUILD,
    "a masked array that is filled with a range": masked_array(b"K\x00\x85")
    + masked_state((1,), b"a", b"\x00", RANGE)
    + BUILD,
    "a masked array without a mask": masked_array(b"K\x00\x85")
    + array_state((1,), dtype("u1"), byte_string(b"a"))
    + BUILD,
    "a NumPy array with a mask": numpy_array(masked_state((1,), b"a", b"\x00")),
    "a state for NumPy's one masked value": call("numpy.ma.core", "MaskedConstant")
    + masked_state((), b"a", b"\x01")
    + BUILD,
    "a state for NumPy's type of strings": dtype("T", dtype_state(16, 0)),
    "a NumPy type of strings with other arguments": call(
        "numpy._core._internal", "_convert_to_stringdtype_kwargs", b"](K\x01e", NONE, NONE
    ),
    "a NumPy array of strings from bytes": numpy_array(array_state((1,), dtype("T"), byte_string(b"A" * 16))),
    "a NumPy array of strings that are not there": numpy_array(array_state((1 << 27,), dtype("T"), b"]")),
    "a NumPy scalar of strings": call("numpy.core.multiarray", "scalar", dtype("T"), byte_string(b"A" * 16)),
    "a NumPy scalar of hidden objects": call(
        "numpy.core.multiarray",
        "scalar",
        dtype(
            "V8",
            dtype_state(
                8, 0, names=tuple_of(text("a")), fields=b"}" + text("a") + tuple_of(dtype("O8"), b"K\x00") + b"s"
            ),
        ),
        byte_string(b"A" * 8),
    ),
}


@pytest.mark.parametrize("name", MEMORY)
def test_demand_for_memory_is_refused(refused: Any, name: str) -> None:
    refused("loads", data=pickled(MEMORY[name]))


@pytest.mark.parametrize("index", [1 << 20, 2**31 - 1, 2**32 - 1])
def test_huge_memo_number_costs_nothing(attack: Any, index: int) -> None:
    number = struct.pack("<I", index)
    assert attack("loads", data=pickled(b"]r" + number + b"0j" + number)).error is None


@pytest.mark.parametrize("unit", [b"\x8f", b"N\x94\x94\x94", b"]", b"N\x85\x85\x85", b"(]\x910"], ids=repr)
def test_more_containers_than_a_newer_pickler_writes_are_refused(refused: Any, unit: bytes) -> None:
    refused("loads", data=newer(b"]" + unit * 300_000))


@pytest.mark.parametrize("unit", [b"]", b"}", b"(", b"N\x85", b"]0", b"N\x85\x85"], ids=repr)
def test_more_containers_than_a_pickler_writes_are_refused(refused: Any, unit: bytes) -> None:
    refused("loads", data=pickled(b"]" + unit * 300_000))


# --- time

LAUGHS = laughs(60)
DEEP = b")" + b"\x85" * 300_000
PLACE = b"ctorch\nFloatStorage\n"
TIME: dict[str, bytes] = {
    "as a key": b"}" + LAUGHS + b"K\x01s",
    "among keys": b"}" + MARK + LAUGHS + b"K\x01u",
    "in a set": call("builtins", "set", b"]" + LAUGHS + b"a"),
    "in a frozenset": call("builtins", "frozenset", LAUGHS + b"\x85"),
    "in a counter": call("collections", "Counter", LAUGHS + b"\x85"),
    "in an ordered mapping": call("collections", "OrderedDict", LAUGHS + b"K\x01\x86\x85"),
    "in a set of protocol 4": b"\x8f(" + LAUGHS + b"\x90",
    "in a frozenset of protocol 4": b"(" + LAUGHS + b"\x91",
    "as a storage id": LAUGHS + b"Q",
    "in a storage id": tuple_of(text("storage"), PLACE, LAUGHS, text("cpu"), b"K\x01") + b"Q",
    "as an encoding": call("_codecs", "encode", text("a"), LAUGHS),
    "as a NumPy type": call("numpy", "dtype", LAUGHS),
    "as a torch device": call("torch", "device", LAUGHS),
    "as a torch size": call("torch", "Size", LAUGHS),
    "as a shape": tensor(b"K\x00", LAUGHS, EMPTY),
    "as an element type": call(
        "torch._utils", "_rebuild_tensor_v3", STORAGE, b"K\x00", EMPTY, EMPTY, b"\x89", HOOKS, LAUGHS
    ),
    "as a NumPy shape": call("numpy.core.multiarray", "_reconstruct", b"cnumpy\nndarray\n", LAUGHS, text("b")),
    "as a NumPy state": numpy_array(LAUGHS),
    "as a bytearray": call("builtins", "bytearray", LAUGHS),
    "as a number": call("builtins", "complex", LAUGHS),
    "called": LAUGHS + EMPTY + REDUCE,
}


@pytest.mark.parametrize("where", TIME)
def test_laughs_are_refused(refused: Any, where: str) -> None:
    refused("loads", data=pickled(TIME[where]))


@pytest.mark.parametrize("where", ["value", "list", "slice"])
@pytest.mark.parametrize("action", ["load", "restore_object", "restore_state", "restore_built"])
def test_laughs_as_a_value_cost_nothing(attack: Any, forge: Any, where: str, action: str) -> None:
    value = {"value": LAUGHS, "list": b"", "slice": call("builtins", "slice", LAUGHS)}[where]
    if where == "list":
        value = b"]" + b"".join(b"q" + bytes([i]) + b"0](h" + bytes([i]) + b"h" + bytes([i]) + b"e" for i in range(60))
    attack(action, forge(pickled(b"}" + text("a") + value + b"s")))


@pytest.mark.parametrize("shape", ["list", "tuple"])
@pytest.mark.parametrize("action", ["load", "restore_object", "restore_state", "restore_built"])
def test_deep_value_costs_nothing(attack: Any, forge: Any, shape: str, action: str) -> None:
    value = DEEP if shape == "tuple" else b"]" * 200_000 + b"a" * 199_999
    attack(action, forge(pickled(b"}" + text("a") + value + b"s")))


@pytest.mark.parametrize("where", ["as a key", "in a set", "as a storage id", "as a NumPy type", "as a torch size"])
def test_deep_tuple_is_refused(refused: Any, where: str) -> None:
    refused("loads", data=pickled(TIME[where].replace(LAUGHS, DEEP)))


# --- broken streams

BROKEN: dict[str, bytes] = {
    "nothing": b"",
    "no end": b"\x80\x02N",
    "nothing on the stack": b"\x80\x02.",
    "protocol 255": b"\x80\xffN.",
    "a tuple of nothing": pickled(b"\x87"),
    "no mark": pickled(b"t"),
    "a memo number that was not put": pickled(b"h\x05"),
    "a call of a number": pickled(b"K\x01)R"),
    "a call without a tuple": pickled(b"cbuiltins\nset\nK\x01R"),
    "an odd number of keys and values": pickled(b"}(K\x01u"),
    "an unhashable key": pickled(b"}]K\x01s"),
    "state for a number": pickled(b"K\x01}" + text("x") + b"K\x01sb"),
    "invalid UTF-8": pickled(b"X\x01\x00\x00\x00\xff"),
    "a name without an end": b"\x80\x02cos",
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_stream_is_refused(refused: Any, name: str) -> None:
    refused("loads", data=BROKEN[name])


# --- arrays

GRID = struct.pack("<4f", 1, 2, 3, 4)


def shard(
    key: str, shape: tuple[int, ...], stride: tuple[int, ...], kind: str = "torch", dtype: str = "float32"
) -> Shard:
    return Shard(key, dtype, kind, shape, stride, shape, (0,) * len(shape))


def stored(record: str = "0", shape: bytes = b"K\x04\x85", stride: bytes = b"K\x01\x85", count: int = 4) -> bytes:
    storage = MARK + text("storage") + PLACE + text(record) + text("cpu") + integer(count) + TUPLE + b"Q"
    return tensor(b"K\x00", shape, stride, storage)


def state(array: bytes) -> bytes:
    return pickled(b"}" + text("w") + array + b"s")


WHOLE = shard("w", (4,), (1,))
ARRAYS: dict[str, bytes] = {
    "of another record": stored("1"),
    "of a record with a path": stored("../0"),
    "of another shape": stored(shape=b"K\x05\x85"),
    "of a negative shape": stored(shape=integer(-1) + b"\x85"),
    "of huge strides": stored(stride=HUGE + b"\x85"),
    "of more strides than dimensions": stored(stride=b"K\x01K\x01\x86"),
    "given another state": stored() + tuple_of(b"\x88", NONE, HOOKS) + BUILD,
    "given the storage of another": stored() + tuple_of(stored(), b"K\x00", b"K\x02\x85", b"K\x01\x85") + BUILD,
    "given attributes": stored() + b"}" + text("x") + b"K\x01s" + BUILD,
    "given six fields": stored() + b"](" + b"".join(map(text, "abcdef")) + b"e" + BUILD,
    "given an element": stored() + b"K\x00G" + struct.pack(">d", 5.0) + b"s",
}


@pytest.mark.parametrize("action", ["load", "restore_object", "restore_state"])
@pytest.mark.parametrize("name", ARRAYS)
def test_array_that_the_index_does_not_list_is_refused(attack: Any, forge: Any, name: str, action: str) -> None:
    outcome = attack(action, forge(state(ARRAYS[name]), [GRID], [WHOLE], [0]))
    # an entry that no reader builds blocks no other: a restore that wants it names it
    assert outcome.is_format or (action == "restore_state" and outcome.error == "RestoreError"), outcome
    assert outcome.message


@pytest.mark.parametrize("action", ["load", "restore_object", "restore_state"])
def test_array_that_the_index_lists_is_accepted(attack: Any, forge: Any, action: str) -> None:
    assert attack(action, forge(state(stored()), [GRID], [WHOLE], [0])).error is None


@pytest.mark.parametrize("kind", ["torch", "numpy", "cupy"])
@pytest.mark.parametrize(
    ("shape", "stride"),
    [
        ((1 << 40,), (0,)),
        ((1 << 61, 4), (0, 1)),
        ((1 << 62, 1 << 62), (0, 0)),
        ((0, 1 << 62), (1, 1)),
        ((0, (1 << 64) - 1), (1, 1)),
        ((1,) * 255, (1,) * 255),
        ((1, 4), ((1 << 62) - 1, 1)),
        ((1, 4), ((1 << 64) - 1, 1)),
        ((1, 1, 4), (1 << 61, 1 << 61, 1)),
    ],
    ids=[
        "repeated",
        "repeated rows",
        "more than 2**63",
        "empty",
        "empty 2**64",
        "255",
        "stride",
        "stride -1",
        "strides",
    ],
)
@pytest.mark.parametrize("action", ["load", "restore_object"])
def test_impossible_shape_costs_nothing(
    attack: Any, forge: Any, shape: tuple[int, ...], stride: tuple[int, ...], kind: str, action: str
) -> None:
    array = stored(shape=tuple_of(*map(integer, shape)), stride=tuple_of(*map(integer, stride)))
    attack(action, forge(state(array), [GRID], [shard("w", shape, stride, kind)], [0]))


def test_every_global_that_is_safe_is_what_it_says(attack: Any) -> None:
    good: list[Callable[[], bytes]] = [
        lambda: call("builtins", "set", b"](K\x01K\x02e"),
        lambda: call("__builtin__", "frozenset", b"](K\x01K\x02e"),
        lambda: RANGE,
        lambda: call("builtins", "slice", b"K\x01", b"K\x02", NONE),
        lambda: call("collections", "Counter", b"}" + text("a") + b"K\x02s"),
        lambda: HOOKS + b"}" + text("_metadata") + b"}s" + BUILD,
        lambda: numpy_array(array_state((2,), dtype("f8", dtype_state(-1, 0)), byte_string(bytes(16)))),
        lambda: numpy_array(array_state((2,), dtype("O8", dtype_state(-1, 63)), b"](K\x01NeN" + b"0")),
        lambda: call("torch", "Size", b"K\x02K\x03\x86"),
        lambda: pickle_writer.dumps(np.array(["2020-01-01"], "M8[D]"))[2:-1],
        lambda: pickle_writer.dumps(np.array([(1, 2.0)], [("a", "i4"), ("b", "f8", (2,))]))[2:-1],
        lambda: pickle_writer.dumps(np.array([(1, 2.0)], np.dtype("i1,f8", align=True)))[2:-1],
        lambda: pickle_writer.dumps(np.array([(1, None)], [("a", "i4"), ("b", "O")]))[2:-1],
        lambda: pickle_writer.dumps([np.array(["a"], "U3"), np.array([b"a"]), np.float32(1), np.array([1], ">i4")])[
            2:-1
        ],
        lambda: pickle_writer.dumps([np.rec.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]), np.ma.array([1], mask=[1])])[
            2:-1
        ],
        lambda: pickle_writer.dumps([np.array(["a"], np.dtypes.StringDType()), np.ma.masked])[2:-1],
        lambda: b"ctorch\nfloat32\n",
        lambda: tuple_of(*[tuple_of(*[integer(i)] * 50) for i in range(50)]) + b"q\x01}h\x01K\x01s",
    ]
    outcomes = [attack("loads", data=pickled(make())) for make in good]
    assert [o.message for o in outcomes if o.error is not None] == []


# --- a pickle of which a part is built

PICKED = {**CODE, **OPCODES, **CHANGES, **MEMORY, **TIME}


@pytest.mark.long
@pytest.mark.parametrize("name", PICKED)
def test_a_part_is_picked_within_the_same_bounds(attack: Any, name: str) -> None:
    attack("pick", data=pickled(PICKED[name]))
    attack("pick", data=pickled(PICKED[name].replace(LAUGHS, DEEP)))


@pytest.mark.parametrize("name", CODE)
def test_a_call_of_a_foreign_name_is_left(attack: Any, name: str) -> None:
    outcome = attack("pick", data=pickled(b"](" + CODE[name] + b"K\x01e"))
    assert outcome.error in ("TrustError", "FormatError", None)


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 3000])
def test_looking_for_what_is_left_takes_bounded_time(attack: Any, count: int) -> None:
    large = b"](" + b"K\x01" * 20_000 + b"eq\x00"
    attack(
        "pick", data=pickled(large + (b"cbuiltins\nslice\nh\x00\x85R0" * count) + b"K\x010"), trust=["builtins.slice"]
    )
