"""The command ``datastates timeline``: draws a trace as one page of HTML."""

from __future__ import annotations

import argparse

from datastates.cli.arguments import as_location
from datastates.cli.output import WrongCallError, print_json, say
from datastates.cli.show import as_size
from datastates.cli.timeline_page import page
from datastates.executor.timeline import read_trace
from datastates.storage import store_of

WHAT = "draw a trace of snapshots, restores or a run as one page of HTML"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments to the command's parser."""
    command.add_argument("trace", metavar="TRACE", type=as_location, help="a file that trace() has written")
    what = "the page to write; an existing file is replaced"
    command.add_argument("-o", "--output", metavar="OUT.html", type=as_location, required=True, help=what)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    trace, output = arguments.trace, arguments.output
    try:
        html = page(read_trace(trace), f"datastates: {trace.name}")
    except ValueError as error:
        raise WrongCallError(f"{trace} is no trace: {error}") from error
    data = html.encode("utf-8", "backslashreplace")
    store_of(output).replace(output, data)
    if arguments.json:
        print_json({"ok": True, "path": str(output), "bytes": len(data)})
    else:
        say(f"{output}: {as_size(len(data))}, to be opened in a browser")
    return 0
