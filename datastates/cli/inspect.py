"""The command ``datastates inspect``: sums up a checkpoint, and lists its tensors and objects."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from datastates.cli.arguments import add_checkpoint
from datastates.cli.output import IN_SHELL, as_key, as_part, as_shape, as_size, print_json, print_table, printable, say
from datastates.cli.sharing import shared_with
from datastates.commit import manifest
from datastates.container.file import Container
from datastates.container.logical import Logical, combine
from datastates.formats import recognise
from datastates.formats.own import OwnCheckpoint
from datastates.reading.tensors import Metadata, TensorFile

WHAT = "show what a checkpoint holds: keys, types, shapes, sizes, places"

_MOST_STEPS = 3
"""Steps that share bytes, of which the number is shown."""
_LONGEST = 80
"""Most characters that are shown of a text."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments to the command's parser."""
    add_checkpoint(command, "path")
    command.add_argument("--keys", metavar="GLOB", default="*", help="only keys that match, as of a shell")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    with recognise.opened(arguments.path, arguments.step, IN_SHELL) as opened:
        files = opened.files
    kind, path, metadata = opened.format, opened.tensors.path, opened.tensors.metadata
    metric = opened.metric if isinstance(opened, OwnCheckpoint) else None
    tensors = combine([one.shards for one in files])
    digests = {key: f"{t.stored_digest:08x}" for key, t in tensors.items() if t.stored_digest is not None}
    described = [_describe(one, digests) for one in files]
    assembled = [_assemble(key, t, described) for key, t in tensors.items() if fnmatchcase(key, arguments.keys)]
    for one in described:
        for entries in ("arrays", "objects"):
            one[entries] = [entry for entry in one[entries] if fnmatchcase(entry["key"], arguments.keys)]
    found = modules({t["key"]: t["bytes"] for t in assembled})
    shared = shared_with(path)
    if arguments.json:
        listed = [{"name": name, "arrays": arrays, "bytes": nbytes} for name, arrays, nbytes in found]
        texts = {"metadata": dict(metadata.texts), "index_metadata": dict(metadata.index)}
        sums = {"format": kind, "metric": metric, "shared": shared, **texts, "modules": listed}
        print_json({**sums, "containers": described, "tensors": assembled})
        return 0
    place = described[0]["file"] if len(described) == 1 else path
    measured = "" if metric is None else f", metric {metric}"
    say(f"{place}  {_head(kind, described)}, {as_size(sum(one['bytes'] for one in described))}{measured}")
    say(_sums(len(tensors), assembled, objects=sum(len(one["objects"]) for one in described)))
    _print_shared(shared)
    _print_metadata(metadata)
    _print_modules(found)
    say("")
    if len(described) == 1:
        _print_file(described[0])
    else:
        _print_assembled(described, assembled)
    return 0


def _sums(count: int, shown: Sequence[dict[str, Any]], *, objects: int) -> str:
    """The number of arrays and their bytes, in all and by type; ``count`` arrays are in the checkpoint."""
    by_type: dict[str, int] = {}
    for t in shown:
        by_type[t["dtype"]] = by_type.get(t["dtype"], 0) + t["bytes"]
    types = ", ".join(f"{as_size(n)} of {name}" for name, n in sorted(by_type.items(), key=lambda item: -item[1]))
    arrays = f"{len(shown)} of {count} arrays, {as_size(sum(by_type.values()))}"
    return f"{arrays}{types and f' ({types})'}; {objects} object(s)"


def _print_shared(shared: Mapping[int, int]) -> None:
    """Print how many bytes the checkpoint shares with others, those that share most first."""
    steps = sorted(shared.items(), key=lambda item: -item[1])
    told = [f"{as_size(nbytes)} with step {step}" for step, nbytes in steps[:_MOST_STEPS]]
    if told:
        more = f", some with {len(steps) - _MOST_STEPS} more" if len(steps) > _MOST_STEPS else ""
        say(f"shares {', '.join(told)}{more}")


def _print_metadata(metadata: Metadata) -> None:
    """Print each text beside the tensors in one line, the beginning of a long one."""
    for name, value in {**metadata.index, **metadata.texts}.items():
        text = printable(str(value))
        more = f"... ({len(text)} characters)" if len(text) > _LONGEST else ""
        say(f"metadata {printable(name)}: {text[:_LONGEST]}{more}")
    for name in metadata.differing:
        say(f"metadata {printable(name)}: differs from file to file")


def _print_modules(found: Sequence[Module]) -> None:
    """Print the modules, with the share of each in the bytes of all arrays."""
    whole = sum(module.nbytes for module in found)
    rows = [["MODULE", "ARRAYS", "SIZE", "SHARE"]]
    for name, arrays, nbytes in found:
        share = f"{nbytes / whole:.1%}" if whole else ""
        rows.append([printable(name) or "(no module)", str(arrays), as_size(nbytes), share])
    print_table(rows, numbers=(1, 2, 3))


def _head(kind: str, files: Sequence[dict[str, Any]]) -> str:
    """The headline of the output: step and ranks, or the kind of checkpoint and the number of its files."""
    if not files or "step" not in files[0]:
        return kind if len(files) == 1 else f"{kind}, {len(files)} files"
    first = files[0]
    ranks = first["world_size"]
    if len({one.get("rank") for one in files}) == 1:
        return f"step {first['step']}, rank {first['rank']} of {ranks}"
    return f"step {first['step']}, {ranks} ranks"


def _print_file(one: dict[str, Any]) -> None:
    """Print each tensor, or part of a tensor, of one file."""
    rows = [["KEY", "TYPE", "SHAPE", "SIZE", "OFFSET", "DIGEST"]]
    for a in one["arrays"]:
        part = "" if a["shape"] == a["global_shape"] else f" of {as_shape(a['global_shape'])}"
        numbers = [as_size(a["bytes"]), str(a["offset"])]
        rows.append([as_key(a["key"]), a["dtype"], as_shape(a["shape"]) + part, *numbers, a["digest"] or "unknown"])
    rows += [[as_key(o["key"]), "object", "", *_size_and_offset(o), ""] for o in one["objects"]]
    print_table(rows, numbers=(3, 4))


def _print_assembled(files: Sequence[dict[str, Any]], tensors: Sequence[dict[str, Any]]) -> None:
    """Print each logical tensor once, and below it its parts, by the rank or the file that holds each."""
    by_rank = all("rank" in one for one in files)
    rows = [["KEY", "TYPE", "SHAPE", "RANK" if by_rank else "FILE", "PART", "SIZE", "OFFSET", "DIGEST"]]
    for t in tensors:
        digest = t["digest"] or "unknown"
        rows.append([as_key(t["key"]), t["dtype"], as_shape(t["shape"]), "", "", as_size(t["bytes"]), "", digest])
        rows += [
            ["", "", "", _holder(p), as_part(p, t["shape"]), as_size(p["bytes"]), str(p["offset"]), ""]
            for p in t["parts"]
        ]
    for one in files:
        for o in one["objects"]:
            rows.append([as_key(o["key"]), "object", "", _holder(one), "", *_size_and_offset(o), ""])
    print_table(rows, numbers=(3, 5, 6) if by_rank else (5, 6))


def _holder(one: Mapping[str, Any]) -> str:
    """The rank of a file or a part as text; the file's name where no rank is known."""
    return str(one["rank"]) if "rank" in one else printable(one["file"].rpartition("/")[2])


def _size_and_offset(entry: Mapping[str, Any]) -> list[str]:
    return ["", ""] if entry["offset"] is None else [as_size(entry["bytes"]), str(entry["offset"])]


def _assemble(key: str, tensor: Logical, files: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Describe a logical tensor and its parts for the output. Empty parts are left out."""
    stored = [(files[f], files[f]["arrays"][i]) for f, i, row in tensor.parts if row.part.numel]
    _, _, first = tensor.parts[0]
    return {
        "key": key,
        "kind": first.kind,
        "dtype": tensor.dtype,
        "shape": tensor.shape,
        "bytes": math.prod(tensor.shape) * first.dtype.itemsize,
        "digest": None if tensor.stored_digest is None else f"{tensor.stored_digest:08x}",
        "parts": [
            {
                **{n: one[n] for n in ("rank", "file") if n in one},
                **{n: a[n] for n in ("shape", "box", "flat", "bytes", "offset")},
            }
            for one, a in stored
        ],
    }


def _describe(one: TensorFile, digests: Mapping[str, str]) -> dict[str, Any]:
    table, offset = one.shards, one.data_offset
    arrays = [
        {
            "key": row.key,
            "kind": row.kind,
            "dtype": row.dtype.name,
            "shape": row.shape,
            "stride": row.stride,
            "global_shape": row.global_shape,
            "box": row.box,
            "flat": row.flat,
            "bytes": math.prod(row.shape) * row.dtype.itemsize,
            "offset": int(offset[row.record]) + row.offset,
            "record": row.record,
            "record_crc32": one.record_crc(row.record),
            "digest": digests.get(row.key),
        }
        for row in table.rows(range(len(table)))
    ]
    objects = [{"key": o.key, "bytes": o.nbytes, "offset": o.offset, "crc32": o.crc} for o in one.objects]
    identity: dict[str, Any] = one.index.identity if isinstance(one, Container) else {}
    if identity and not manifest.has_step(one.path, identity):
        world = {name: identity[name] for name in ("rank", "world_size")}
        identity = world if manifest.is_kept(one.path.name) else {}
    return {"file": str(one.path), **identity, "bytes": one.nbytes, "arrays": arrays, "objects": objects}


MOST = 16
"""Most modules of a summary."""
_SEPARATOR = re.compile(r"[./]")
_NUMBER = re.compile(r"(?<![^./_])\d+(?![^./])")
_Arrays = Sequence[tuple[Sequence[str], int]]
"""For each array, the modules around it, the outermost first, and its bytes."""


class Module(NamedTuple):
    """The arrays of one module.

    Attributes:
        name: The beginning of their keys, with ``*`` for a number: ``model/layers.*.mlp``. Empty for all arrays.
        arrays: Number of the arrays.
        nbytes: Bytes of the arrays.
    """

    name: str
    arrays: int
    nbytes: int


def modules(nbytes: Mapping[str, int]) -> list[Module]:
    """Sum up arrays by module, in at most :data:`MOST` modules; the largest comes first.

    The names in a key are separated by slashes and dots. The last one is the array's, the others are modules. Numbered
    modules count as one. The largest module is divided into those inside it, again and again, until they would be too
    many. What a divided module holds directly keeps its name.

    Args:
        nbytes: The bytes of each array, by full key.
    """
    shown: dict[str, _Arrays] = {"": [(_around(key), n) for key, n in nbytes.items()]}
    while divisible := [name for name, arrays in shown.items() if any(around[-1] != name for around, _ in arrays)]:
        largest = max(divisible, key=lambda name: _sum(shown[name]))
        divided = {name: arrays for name, arrays in shown.items() if name != largest} | _inside(largest, shown[largest])
        if len(divided) > MOST:
            break
        shown = divided
    found = [Module(name, len(arrays), _sum(arrays)) for name, arrays in shown.items() if arrays]
    return sorted(found, key=lambda module: -module.nbytes)


def _around(key: str) -> list[str]:
    """The modules around an array, the outermost first: the beginnings of its key, from the empty one on."""
    name = _NUMBER.sub("*", key)
    return ["", *(name[: match.start()] for match in _SEPARATOR.finditer(name))]


def _inside(module: str, arrays: _Arrays) -> dict[str, _Arrays]:
    """The arrays of a module by the next module inside it."""
    found: dict[str, list[tuple[Sequence[str], int]]] = {}
    for around, n in arrays:
        name = around[min(around.index(module) + 1, len(around) - 1)]
        found.setdefault(name, []).append((around, n))
    return dict(found)


def _sum(arrays: _Arrays) -> int:
    return sum(n for _, n in arrays)
