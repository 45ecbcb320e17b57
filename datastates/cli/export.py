"""The command ``datastates export``: writes a checkpoint's tensors as files of other tools."""

from __future__ import annotations

import argparse
import re

from datastates.cli.arguments import add_checkpoint, as_location
from datastates.cli.output import IN_SHELL, WrongCallError, as_key, as_size, print_json, printable, progress_bar, say
from datastates.config import IoSettings
from datastates.errors import FormatError
from datastates.exporting.export import export
from datastates.exporting.request import CASTS, ExportRequest
from datastates.formats import own
from datastates.restoring.renaming import Renames

WHAT = "write a checkpoint's tensors as safetensors or for torch.load; exit 1 unless all that is read is proven"
_OPTION = re.compile("(keys|rename|dtype|shard_size|step):")
"""The beginning of an error message about an argument of ``export()``. The shell knows the argument as an option."""
PATTERN = "re:"
"""Prefix of a rename by a regular expression."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments to the command's parser."""
    add_checkpoint(command, "source")
    add = command.add_argument
    add(
        "target",
        metavar="TARGET",
        type=as_location,
        help="what to make. A name that ends in .safetensors: one file; in .pt, .pth, .bin or .ckpt: one file that "
        "torch.load opens, with a flat dict of tensors; any other: a folder of safetensors files",
    )
    add("--keys", action="append", metavar="GLOB", help="only tensors whose full keys match, as of a shell; repeatable")
    add(
        "--rename",
        action="append",
        default=[],
        metavar="OLD=NEW",
        help="replace the prefix OLD of a name, or what the regular expression re:OLD matches; repeatable",
    )
    add("--dtype", choices=[*CASTS], help="cast floating-point tensors to this type; default: no cast")
    add("--shard-size", metavar="SIZE", help="most bytes of tensors in a file of a folder; default: 5GB")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    try:
        with progress_bar("export", quiet=arguments.json) as progress:
            request = ExportRequest.of(
                arguments.target,
                step=arguments.step,
                keys=arguments.keys or "*",
                rename=_renames(arguments.rename),
                dtype=arguments.dtype,
                shard_size=arguments.shard_size,
            )
            done = export(arguments.source, request, IoSettings.of({}), progress, IN_SHELL)
    except FormatError:  # a ValueError, too
        raise
    except (ValueError, TypeError, FileExistsError) as error:
        raise WrongCallError(_OPTION.sub(lambda match: f"--{match[1].replace('_', '-')}:", str(error))) from error
    if arguments.json:
        print_json(
            {
                "source": done.source,
                "path": str(done.path),
                "files": done.files,
                "tensors": done.tensors,
                "bytes": done.nbytes,
                "tied": done.tied,
                "objects": done.objects,
                "unproven": done.unproven,
                "metadata": done.metadata,
                "cast": done.cast,
            }
        )
    else:
        for name, kept in done.tied.items():
            say(f"{printable(name)} is the same tensor as {printable(kept)}, which is written once")
        for key in done.objects:
            say(f"{as_key(key)}: what is no tensor in it is left out")
        for name in done.metadata:
            say(f"{printable(name)}: this metadata of the source has no place in the target, and is left out")
        if done.source == own.NAME:
            for key in done.unproven:
                say(f"{as_key(key)} matches its checksums; it has no digest")
        else:
            proven = f"{len(done.unproven)} of {done.tensors} tensors have no checksum to match"
            what = proven if done.unproven else "every tensor matches its checksum"
            say(f"{arguments.source} is {done.source}: {what}")
        how = "as saved" if done.source == own.NAME else "as read"
        if done.cast:
            rest = f", the others {how}" if len(done.cast) < done.tensors else ""
            how = f"{len(done.cast)} cast to {arguments.dtype}{rest}"
        say(f"{done.path}: {done.tensors} tensors, {as_size(done.nbytes)} in {len(done.files)} file(s), {how}")
    return 0


def _renames(given: list[str]) -> Renames:
    """Parse the renames, in order; raises ValueError for one that is not ``OLD=NEW``, or with a faulty pattern."""
    found: dict[str | re.Pattern[str], str] = {}
    for text in given:
        old, equals, new = text.rpartition("=")
        if not equals or not old:
            raise ValueError(f"--rename: {text!r} is not OLD=NEW")
        if old.startswith(PATTERN):
            try:
                found[re.compile(old.removeprefix(PATTERN))] = new
            except re.error as error:
                raise ValueError(f"--rename: {old!r} is no regular expression: {error}") from error
        else:
            found[old] = new
    return found
