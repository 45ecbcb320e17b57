"""The command line: ``datastates ls|inspect|verify|diff|export``. Only ``export`` imports a framework."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from importlib import metadata
from pathlib import Path
from typing import Any

from datastates._base import paths
from datastates.cli import export
from datastates.cli.compare import Comparison, compare
from datastates.cli.progress import progress_bar
from datastates.cli.show import as_part, as_shape, as_size, print_json, print_table, printable
from datastates.cli.verify import verify_catalog, verify_container
from datastates.commit import directories, health, manifest, retention
from datastates.container.file import Container
from datastates.container.logical import Logical, combine
from datastates.errors import CheckpointNotFoundError, DatastatesError, FormatError, StorageError
from datastates.restoring.stored import Head, open_all
from datastates.state.shards import full_key

STATUS = (
    """exit status: 0 all is well; 1 something is damaged or differs; 2 a wrong call, or nothing there to look at"""
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status, as :data:`STATUS` says."""
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except DatastatesError as error:
        print(f"datastates: {error}", file=sys.stderr)
        return 2 if isinstance(error, CheckpointNotFoundError) else 1
    except BrokenPipeError:
        # the reader of our output has closed it; keep the interpreter from writing the rest at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="datastates", description="Look at checkpoints.", epilog=STATUS)
    parser.add_argument("--version", action="version", version=f"%(prog)s {metadata.version('datastates')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for run, name, argument, what in (
        (_ls, "ls", "DIR", "list the checkpoints in a directory, and what interrupted runs left there"),
        (_inspect, "inspect", "PATH", "show what a checkpoint holds: keys, types, shapes, sizes, places"),
        (_verify, "verify", "PATH", "read every byte of a checkpoint and check it; exit 1 when one is wrong"),
    ):
        command = commands.add_parser(name, help=what, description=what[0].upper() + what[1:] + ".", epilog=STATUS)
        target = (
            "a directory of checkpoints"
            if name == "ls"
            else "a checkpoint, a directory of them (the newest), or a container file"
        )
        command.add_argument("path", metavar=argument, type=_path, help=target)
        command.add_argument("--json", action="store_true", help="print JSON for programs")
        if name == "inspect":
            command.add_argument("--keys", metavar="GLOB", default="*", help="only keys that match, as of a shell")
        command.set_defaults(run=run)
    what = "compare two checkpoints by their digests; exit 1 when they differ, 2 when they cannot be compared"
    diff = commands.add_parser("diff", help=what, description=what[0].upper() + what[1:] + ".", epilog=STATUS)
    for name in ("A", "B"):
        diff.add_argument(name, type=_path, help="a checkpoint, a directory of them (the newest), or a container file")
    diff.add_argument("--json", action="store_true", help="print JSON for programs")
    diff.set_defaults(run=_diff)
    export.add_to(commands, _path, STATUS)
    return parser


def _path(text: str) -> Path:
    try:
        paths.refuse_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return Path(text)


def _ls(arguments: argparse.Namespace) -> int:
    root: Path = arguments.path
    if not root.is_dir():
        print(f"datastates: {root} is not a directory", file=sys.stderr)
        return 2
    if (root / manifest.FILE).exists():
        print(f"datastates: {root} is one checkpoint: use inspect", file=sys.stderr)
        return 2
    by_age = directories.by_age(root)
    found: list[dict[str, Any]] = []
    for age, (step, path) in enumerate(by_age.items()):
        later = next((other for other in list(by_age)[age + 1 :] if other < step), None)
        entry: dict[str, Any] = {"step": step, "name": path.name, "superseded_by": later}
        with contextlib.suppress(FormatError, StorageError):  # reported below
            opened = manifest.open(path)
            entry |= {"created": opened.created, "ranks": opened.world_size, "bytes": opened.nbytes}
        if (what := health.problem(path)) is not None:
            entry["error"] = what
        found.append(entry)
    left = [path.name for path in retention.debris(root)]
    foreign = [path.name for path in directories.without_manifest(root)]
    if arguments.json:
        print_json({"checkpoints": found, "debris": left, "without_manifest": foreign})
    elif found or left or foreign:
        rows = [["STEP", "CREATED", "RANKS", "SIZE", "NAME", ""]]
        for e in found:
            size = [e["created"], str(e["ranks"]), as_size(e["bytes"])] if "created" in e else ["", "", ""]
            rolled = "" if e["superseded_by"] is None else f"superseded by step {e['superseded_by']}, after a roll-back"
            note = f"damaged: {printable(e['error'])}" if "error" in e else rolled
            rows.append([str(e["step"]), *size, e["name"], note])
        rows += [["-", "debris", "", "", name, ""] for name in left]
        rows += [["-", "", "", "", name, "no checkpoint: it has no manifest.json"] for name in foreign]
        print_table(rows, numbers=(0, 2, 3))
    elif (other := directories.kind_of_other(root)) is not None:
        print(f"datastates: {other}", file=sys.stderr)
        return 2
    else:
        print(f"no checkpoints in {root}")
    return 1 if any("error" in e for e in found) else 0


def _inspect(arguments: argparse.Namespace) -> int:
    with directories.kept(arguments.path) as path:
        containers = open_all(path)
    tensors = combine([one.index.shards for one in containers])
    digests = {key: f"{t.stored_digest:08x}" for key, t in tensors.items() if t.stored_digest is not None}
    described = [_describe(one, digests) for one in containers]
    assembled = [_assemble(key, t, described) for key, t in tensors.items() if fnmatchcase(key, arguments.keys)]
    nbytes = sum(t["bytes"] for t in assembled)
    summary = f"{len(assembled)} of {len(tensors)} arrays, {as_size(nbytes)}"
    for one in described:
        for kind in ("arrays", "objects"):
            one[kind] = [entry for entry in one[kind] if fnmatchcase(entry["key"], arguments.keys)]
    if arguments.json:
        print_json({"containers": described, "tensors": assembled})
        return 0
    if len(described) > 1:
        _print_assembled(path, described, assembled)
        print(summary)
        return 0
    for one in described:
        print(f"{one['file']}  step {one['step']}, rank {one['rank']} of {one['world_size']}, {as_size(one['bytes'])}")
        rows = [["KEY", "TYPE", "SHAPE", "SIZE", "OFFSET", "DIGEST"]]
        for a in one["arrays"]:
            part = "" if a["shape"] == a["global_shape"] else f" of {as_shape(a['global_shape'])}"
            numbers = [as_size(a["bytes"]), str(a["offset"])]
            rows.append(
                [printable(a["key"]), a["dtype"], as_shape(a["shape"]) + part, *numbers, a["digest"] or "unknown"]
            )
        rows += [[printable(o["key"]), "object", "", as_size(o["bytes"]), str(o["offset"]), ""] for o in one["objects"]]
        print_table(rows, numbers=(3, 4))
    print(summary)
    return 0


def _print_assembled(path: Path, containers: Sequence[dict[str, Any]], tensors: Sequence[dict[str, Any]]) -> None:
    """Print each logical tensor once, and below it the part that each rank holds."""
    nbytes = sum(one["bytes"] for one in containers)
    print(f"{path}  step {containers[0]['step']}, {len(containers)} ranks, {as_size(nbytes)}")
    rows = [["KEY", "TYPE", "SHAPE", "RANK", "PART", "SIZE", "OFFSET", "DIGEST"]]
    for t in tensors:
        digest = t["digest"] or "unknown"
        rows.append([printable(t["key"]), t["dtype"], as_shape(t["shape"]), "", "", as_size(t["bytes"]), "", digest])
        rows += [
            ["", "", "", str(p["rank"]), as_part(p, t["shape"]), as_size(p["bytes"]), str(p["offset"]), ""]
            for p in t["parts"]
        ]
    for one in containers:
        for o in one["objects"]:
            rank = str(one["rank"])
            rows.append([printable(o["key"]), "object", "", rank, "", as_size(o["bytes"]), str(o["offset"]), ""])
    print_table(rows, numbers=(3, 5, 6))


def _assemble(key: str, tensor: Logical, containers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A logical tensor and its parts, without empty ones, which only say that a rank knows the tensor."""
    stored = [(containers[c], containers[c]["arrays"][i]) for c, i, row in tensor.parts if row.part.numel]
    _, _, first = tensor.parts[0]
    return {
        "key": key,
        "kind": first.kind,
        "dtype": tensor.dtype,
        "shape": tensor.shape,
        "bytes": math.prod(tensor.shape) * first.dtype.itemsize,
        "digest": None if tensor.stored_digest is None else f"{tensor.stored_digest:08x}",
        "parts": [
            {"rank": one["rank"], "file": one["file"], **{n: a[n] for n in ("shape", "box", "flat", "bytes", "offset")}}
            for one, a in stored
        ],
    }


def _describe(one: Container, digests: Mapping[str, str]) -> dict[str, Any]:
    index = one.index
    arrays = []
    for i in range(len(index.shards)):
        row = index.shards.row(i)
        nbytes = row.dtype.itemsize
        for n in row.shape:
            nbytes *= n
        arrays.append(
            {
                "key": row.key,
                "kind": row.kind,
                "dtype": row.dtype.name,
                "shape": row.shape,
                "stride": row.stride,
                "global_shape": row.global_shape,
                "box": row.box,
                "flat": row.flat,
                "bytes": nbytes,
                "offset": int(index.records.data_offset[row.record]) + row.offset,
                "record": row.record,
                "record_crc32": int(index.records.crc[row.record]),
                "digest": digests.get(row.key),
            }
        )
    objects = [
        {
            "key": full_key(index.shards.providers[o.provider], o.key),
            "bytes": o.nbytes,
            "offset": o.offset,
            "crc32": o.crc,
        }
        for o in index.objects
    ]
    return {"file": str(one.path), **index.identity, "bytes": one.nbytes, "arrays": arrays, "objects": objects}


def _verify(arguments: argparse.Namespace) -> int:
    problems = []
    with directories.kept(arguments.path) as path:
        containers = open_all(path)
        nbytes = sum(c.nbytes for c in containers)
        step = containers[0].index.identity["step"]
        head = None if path.is_file() else Head.of(path, manifest.open(path))
        catalog = None if head is None else head.catalog
        nbytes += 0 if catalog is None else catalog.nbytes
        with progress_bar("verify", quiet=arguments.json) as advance:

            def progress(now: int) -> None:
                advance(now, nbytes)

            for one in containers:
                problems += list(verify_container(one, progress))
            if head is not None and catalog is not None:
                problems += list(verify_catalog(head, containers, progress))
    if arguments.json:
        found = [{"file": str(p.path), "key": p.key, "problem": p.what} for p in problems]
        print_json({"ok": not problems, "path": str(path), "step": step, "bytes": nbytes, "problems": found})
    else:
        for p in problems:
            print(f"{printable(p.key)} in {p.path} {p.what}")
        if not problems:
            print(f"{path}: step {step}, {as_size(nbytes)} in {len(containers)} container(s), every byte is as written")
    return 1 if problems else 0


def _diff(arguments: argparse.Namespace) -> int:
    try:
        with directories.kept(arguments.A) as a, directories.kept(arguments.B) as b:
            found = compare(open_all(a), open_all(b))
    except DatastatesError as error:
        print(f"datastates: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        print_json(
            {
                "equal": found.is_equal,
                "only_a": found.only_a,
                "only_b": found.only_b,
                "descriptions": [{"key": key, "a": a, "b": b} for key, a, b in found.descriptions],
                "contents": found.contents,
                "alike": found.equal,
                "bytes_read": found.read,
            }
        )
    else:
        _print_differences(found, str(arguments.A), str(arguments.B))
    return 0 if found.is_equal else 1


def _print_differences(found: Comparison, a: str, b: str) -> None:
    for where, keys in ((a, found.only_a), (b, found.only_b)):
        for key in keys:
            print(f"{printable(key)} is only in {where}")
    for key, one, other in found.descriptions:
        print(f"{printable(key)} is {one} in {a}, {other} in {b}")
    for key in found.contents:
        print(f"{printable(key)} differs")
    only = len(found.only_a) + len(found.only_b)
    print(
        f"{found.equal} alike, {len(found.contents)} of other contents, {len(found.descriptions)} of another type or "
        f"shape, {only} in one of them only"
    )


if __name__ == "__main__":
    sys.exit(main())
