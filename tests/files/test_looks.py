"""Calls that look at a checkpoint under way wait for it, in each of the ways in which code looks; others do not."""

from __future__ import annotations

import copy
import functools
import glob
import importlib
import logging.handlers
import os
import pickle
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from datastates.errors import CommitError
from datastates.files import looks

Look = Callable[[Path], object]

LOOKS: dict[str, tuple[Look, object]] = {
    "open": (lambda root: (root / "tag" / "a.pt").read_text(), "new"),
    "open latest": (lambda root: (root / "latest").read_text(), "tag"),
    "exists": (lambda root: os.path.exists(root / "tag" / "a.pt"), True),
    "is_file": (lambda root: (root / "latest").is_file(), True),
    "a file of another rank": (lambda root: (root / "tag" / "b.pt").exists(), True),
    "size": (lambda root: os.path.getsize(os.fsencode(root / "tag" / "a.pt")), 3),
    "listdir": (lambda root: sorted(os.listdir(root)), ["latest", "old", "tag"]),
    "listdir of the folder": (lambda root: sorted(os.listdir(root / "tag")), ["a.pt", "b.pt"]),
    "through a link": (lambda root: sorted(os.listdir(root.parent / "link" / "tag")), ["a.pt", "b.pt"]),
    "glob": (lambda root: len(glob.glob(f"{root}/**/*.pt", recursive=True)), 3),
    "rglob": (lambda root: len(list(root.rglob("*.pt"))), 3),
    "walk": (lambda root: sum(len(files) for *_, files in os.walk(root.parent)), 4),
    "copytree": (lambda root: len(list(shutil.copytree(root, root.parent.parent / "copy").rglob("*.pt"))), 3),
    "copy": (lambda root: Path(shutil.copy(root / "tag" / "a.pt", root.parent / "b")).read_text(), "new"),
    "move": (lambda root: len(os.listdir(shutil.move(root / "tag", root / "best"))), 2),
    "link": (lambda root: os.link(root / "tag" / "a.pt", root / "again"), None),
    "mode": (lambda root: os.chmod(root / "tag" / "a.pt", 0o600), None),
    "program": (lambda root: subprocess.run(["test", "-e", root / "latest"], check=True).returncode, 0),
    "shell": (lambda root: os.system(f"test -e {shlex.quote(str(root / 'latest'))}"), 0),
    "delete": (lambda root: shutil.rmtree(root), None),
    "delete an older one": (lambda root: shutil.rmtree(root / "old"), None),
    "delete one beside": (lambda root: shutil.rmtree(root.parent / "beside"), None),
    "delete a file of an older one": (lambda root: os.remove(root / "old" / "a.pt"), None),
}
OTHERS: dict[str, Look] = {
    "the folder itself": lambda root: (root / "tag").is_dir(),
    "the folder above": lambda root: os.listdir(root.parent),
    "an older one": lambda root: (root / "old" / "a.pt").read_text(),
    "a new file beside": lambda root: (root / "state.json").write_text("{}"),
    "a new file in the folder": lambda root: (root / "tag" / "state.json").write_text("{}"),
    "a log that is renewed": lambda root: os.rename(root / "old" / "a.pt", root / "old" / "b.log"),
    "a log that is deleted": lambda root: os.remove(root.parent / "beside" / "train.log"),
    "a descriptor": lambda root: os.stat(0),
    "a program that DeepSpeed starts in a step": lambda root: exec(
        "subprocess.run(['true'], check=True)", {"__name__": "deepspeed.utils.numa", "subprocess": subprocess}
    ),
}


class Writer:
    """Writes a checkpoint when it is told to, on a thread of its own."""

    def __init__(self, root: Path, failure: Exception | None = None) -> None:
        self.root = root
        self.looked = threading.Event()
        self.failure = failure
        real = Path(os.path.realpath(root))
        files = frozenset(map(str, (real / "latest", real / "tag" / "a.pt")))
        self.checkpoint = looks.UnderWay("tag", str(real), str(real / "tag"), files, self.wait)
        looks.begin(self.checkpoint)

    def wait(self) -> Exception | None:
        self.looked.set()
        with looks.unwatched():
            for name, text in (("tag/a.pt", "new"), ("tag/b.pt", "other"), ("latest", "tag")):
                if self.failure is None:
                    (self.root / name).write_text(text)
        looks.end(self.checkpoint)
        return self.failure


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    made = tmp_path / "run" / "root"
    for folder in (made / "tag", made / "old", made.parent / "beside"):
        folder.mkdir(parents=True)
    (made / "old" / "a.pt").write_text("old")
    (made.parent / "beside" / "train.log").touch()
    (made.parent / "link").symlink_to(made)
    yield made
    for checkpoint in looks._under_way:
        looks.end(checkpoint)


@pytest.mark.parametrize("look", LOOKS)
def test_who_looks_waits(root: Path, look: str) -> None:
    (root.parent / "beside" / "train.log").unlink()
    writer = Writer(root)
    look_at, seen = LOOKS[look]
    if look == "walk":
        seen = 4  # three files of checkpoints, and latest
    assert look_at(root) == seen
    assert writer.looked.is_set()


@pytest.mark.parametrize("look", OTHERS)
def test_others_do_not_wait(root: Path, look: str) -> None:
    writer = Writer(root)
    OTHERS[look](root)
    assert not writer.looked.is_set()


def test_nobody_waits_within_a_save_or_on_a_thread_of_this_package(root: Path) -> None:
    writer = Writer(root)
    with looks.unwatched():
        os.listdir(root)
    thread = threading.Thread(target=os.listdir, args=(root,), name="datastates-deepspeed")
    thread.start()
    thread.join()
    assert not writer.looked.is_set()
    thread = threading.Thread(target=os.listdir, args=(root,))
    thread.start()
    thread.join()
    assert writer.looked.is_set()


def test_an_older_one_is_not_deleted_when_the_newer_has_failed(root: Path) -> None:
    Writer(root, OSError(28, "No space left on device"))
    with pytest.raises(CommitError, match=r"old is not deleted: the checkpoint tag has failed: .*No space left"):
        shutil.rmtree(root / "old")
    assert (root / "old" / "a.pt").exists()


def test_a_forked_process_waits_for_nothing(root: Path) -> None:
    writer = Writer(root)
    child = os.fork()
    if child == 0:
        os._exit(0 if "latest" not in os.listdir(root) and not writer.looked.is_set() else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_who_holds_a_lock_that_the_end_may_need_does_not_wait(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer(root)
    (root / "train.log").touch()
    (root / "train.log.2020-01-01").touch()
    monkeypatch.syspath_prepend(root)
    with pytest.raises(ImportError):
        importlib.import_module("no_such_module_anywhere")  # lists the folder
    handler = logging.handlers.TimedRotatingFileHandler(root / "train.log", "D", backupCount=1)
    handler.doRollover()  # lists the folder, and deletes there
    handler.close()
    assert not writer.looked.is_set()


def test_the_functions_that_stand_in_are_taken_for_the_stock_ones(root: Path) -> None:
    Writer(root)
    assert pickle.loads(pickle.dumps(os.stat)) is os.stat is copy.deepcopy(os.stat)
    assert {os.stat, os.access} <= os.supports_dir_fd
    assert os.stat(path=root / "latest", follow_symlinks=False).st_size == 3
    assert sys.modules["posix"].stat(root / "latest").st_size == 3


def test_a_function_without_a_name_may_have_been_put_in_the_place_of_a_known_one() -> None:
    nameless = functools.partial(lambda path: path)
    assert looks._standing_in(nameless, "path", 0, looks._shows)("p") == "p"
    looks._replace(nameless, "path", 0, looks._shows)
