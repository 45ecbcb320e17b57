"""The command line: ``datastates ls|inspect|verify``. Imports no framework."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from datastates import manifest
from datastates.errors import DatastatesError, FormatError
from datastates.opened import Container, open_all
from datastates.protocol import full_key
from datastates.verifying import verify_container


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 1 when something is damaged or missing, 2 for a wrong call."""
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except DatastatesError as error:
        print(f"datastates: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # whoever read our output has seen enough; keep the interpreter from writing the rest at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="datastates", description="Look at checkpoints.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {metadata.version('datastates')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for run, name, argument, what in (
        (_ls, "ls", "DIR", "list the checkpoints in a directory, and what interrupted runs left there"),
        (_inspect, "inspect", "PATH", "show what a checkpoint holds: keys, types, shapes, sizes, places"),
        (_verify, "verify", "PATH", "read every byte of a checkpoint and check it; exit 1 when one is wrong"),
    ):
        command = commands.add_parser(name, help=what, description=what[0].upper() + what[1:] + ".")
        target = (
            "a directory of checkpoints"
            if name == "ls"
            else "a checkpoint, a directory of them (the newest), or a container file"
        )
        command.add_argument("path", metavar=argument, type=Path, help=target)
        command.add_argument("--json", action="store_true", help="print JSON for programs")
        command.set_defaults(run=run)
    return parser


def _print(value: Any) -> None:
    json.dump(value, sys.stdout, indent=2)
    print()


def _table(rows: Sequence[Sequence[str]], numbers: Sequence[int]) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = (c.rjust(w) if i in numbers else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        print("  ".join(cells).rstrip())


def _size(nbytes: int) -> str:
    value, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{int(value)} B" if unit == "B" else f"{value:.1f} {unit}"


def _printable(text: str) -> str:
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")


# --- ls
# ----------------------------------------------------------------------------------------------------------------


def _ls(arguments: argparse.Namespace) -> int:
    root: Path = arguments.path
    if not root.is_dir():
        print(f"datastates: {root} is not a directory", file=sys.stderr)
        return 1
    if (root / manifest.FILE).exists():
        print(f"datastates: {root} is one checkpoint: use inspect", file=sys.stderr)
        return 1
    found: list[dict[str, Any]] = []
    for step, path in manifest.committed(root).items():
        entry: dict[str, Any] = {"step": step, "name": path.name}
        try:
            opened = manifest.open(path)
            entry |= {"created": opened.created, "ranks": opened.world_size, "bytes": opened.nbytes}
        except FormatError as error:
            entry["error"] = str(error)
        found.append(entry)
    left = [path.name for path in manifest.debris(root)]
    if arguments.json:
        _print({"checkpoints": found, "debris": left})
    elif found or left:
        rows = [["STEP", "CREATED", "RANKS", "SIZE", "NAME"]]
        for e in found:
            size = ["damaged", "", ""] if "error" in e else [e["created"], str(e["ranks"]), _size(e["bytes"])]
            rows.append([str(e["step"]), *size, e["name"]])
        rows += [["-", "debris", "", "", name] for name in left]
        _table(rows, numbers=(0, 2, 3))
    else:
        print(f"no checkpoints in {root}")
    return 1 if any("error" in e for e in found) else 0


# --- inspect
# -----------------------------------------------------------------------------------------------------------


def _inspect(arguments: argparse.Namespace) -> int:
    described = [_describe(one) for one in open_all(arguments.path)]
    if arguments.json:
        _print({"containers": described})
        return 0
    for one in described:
        print(f"{one['file']}  step {one['step']}, rank {one['rank']} of {one['world_size']}, {_size(one['bytes'])}")
        rows = [["KEY", "TYPE", "SHAPE", "SIZE", "OFFSET"]]
        for a in one["arrays"]:
            part = "" if a["shape"] == a["global_shape"] else f" of {_shape(a['global_shape'])}"
            rows.append(
                [_printable(a["key"]), a["dtype"], _shape(a["shape"]) + part, _size(a["bytes"]), str(a["offset"])]
            )
        rows += [[_printable(o["key"]), "object", "", _size(o["bytes"]), str(o["offset"])] for o in one["objects"]]
        _table(rows, numbers=(3, 4))
    return 0


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) if shape else "scalar"


def _describe(one: Container) -> dict[str, Any]:
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
                "offset": int(index.data_offset[row.record]) + row.offset,
                "record": row.record,
                "record_crc32": int(index.record_crc[row.record]),
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


# --- verify
# ------------------------------------------------------------------------------------------------------------


def _verify(arguments: argparse.Namespace) -> int:
    containers = open_all(arguments.path)
    problems = []
    with _progress(sum(c.nbytes for c in containers), quiet=arguments.json) as progress:
        for one in containers:
            problems += list(verify_container(one, progress))
    nbytes = sum(c.nbytes for c in containers)
    if arguments.json:
        found = [{"file": str(p.path), "key": p.key, "problem": p.what} for p in problems]
        _print({"ok": not problems, "bytes": nbytes, "problems": found})
    else:
        for p in problems:
            print(f"{_printable(p.key)} in {p.path} {p.what}")
        if not problems:
            print(f"{arguments.path}: {_size(nbytes)} in {len(containers)} container(s), every byte is as written")
    return 1 if problems else 0


@contextlib.contextmanager
def _progress(total: int, *, quiet: bool) -> Iterator[Callable[[int], object]]:
    """A progress bar on a terminal, where tqdm is installed (the ``cli`` extra)."""
    try:
        from tqdm import tqdm
    except ImportError:
        quiet = True
    if quiet or not sys.stderr.isatty():
        yield lambda _: None
        return
    with tqdm(total=total, unit="B", unit_scale=True, desc="verify") as bar:
        yield bar.update


if __name__ == "__main__":
    sys.exit(main())
