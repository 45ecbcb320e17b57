"""Checkpoints that are folders of a framework's own files, written while training goes on, and complete or absent."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from datastates._base import log
from datastates.adapters.shared import naming, small_files
from datastates.adapters.shared.sharded_folders import ShardedFolders
from datastates.adapters.shared.stand_ins import Function, instead_of, standing_in
from datastates.files import in_flight, looks
from datastates.files.hidden import HiddenFolder
from datastates.files.settings import FolderSettings
from datastates.files.torch_files import Lazy, TorchFiles
from datastates.ranks.world import World, settle, world_of
from datastates.saving.snapshot import Snapshot, has_ended
from datastates.storage import Location


class FolderCheckpoints:
    """The folders that a run has begun. All ranks commit a folder together. Used on the training thread."""

    def __init__(self, settings: FolderSettings, kind: str) -> None:
        """Prepare; threads and memory are allocated by the first save.

        Args:
            settings: The settings.
            kind: Names the votes of the ranks.
        """
        self.files = TorchFiles(settings)
        self.snapshots: dict[Path, list[Snapshot]] = {}
        """The last checkpoints that were begun: for each folder, the snapshots of this rank's large files."""
        self.sharded = ShardedFolders(settings)
        """Writes sharded state, if the framework saves any."""
        self._kind = kind
        self._timeout = settings.rank_timeout
        self._world: World | None = None
        self._number = 0
        self._swept: set[tuple[Path, re.Pattern[str]]] = set()
        self._under_way: set[Path] = set()

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy, for when a framework's object is copied or pickled: it has no checkpoint under way."""
        return {**vars(self), "snapshots": {}, "_world": None, "_under_way": set()}

    def save(
        self,
        final: Path,
        write: Callable[[Path, list[Snapshot]], None],
        *,
        needed: str | None = None,
        retain: Callable[[], None] | None = None,
        room: Path | None = None,
        replace: bool = False,
        meets: bool = False,
    ) -> None:
        """Begin a checkpoint. All ranks call it together. Code that looks at it from now on waits until it has ended.

        Args:
            final: The folder that the checkpoint is to be. Other files that are in it stay.
            write: Called with the folder to write into, and a list that takes the snapshots of files under way.
            needed: Names code that may look at the checkpoint unnoticed after this call. The call waits then.
            retain: Called on rank 0 once the checkpoint has its name, to delete others whose names differ in numbers.
                An OSError of it is logged.
            room: The place of the folder until it gets its name; by default beside ``final``.
            replace: Whether the checkpoint replaces everything that is in the folder now.
            meets: Whether ranks wait for each other in ``write``. A failure of storage there is then raised, except of
                ``torch.save``, also with ``on_error="warn"``: the others would wait for ever.

        Raises:
            DatastatesError: With ``on_error="raise"``, an earlier checkpoint has failed and nothing is begun, or it has
                waited for this one, which has failed.
            CommitError: The folder cannot get that name. The other ranks hear of it.
            OSError: With ``on_error="raise"``, the folder cannot be made, or ``write`` cannot write. The others hear.
            Exception: Any other error that ``write`` raises. The other ranks hear of it.
        """
        name = f"{self._kind}/{self._number}"
        self._number += 1  # before anything can fail: all ranks must count the same
        self.files.begin()
        with looks.unwatched():
            target = Path(os.path.realpath(final)) if final.is_symlink() else final
            room = room or target.parent
            world = self._prepare(room, target)
        looks.finish(target)  # this checkpoint replaces the contents that the folder has then
        pending = HiddenFolder(target.name, room, world.token(name))
        staged = Path(pending.written)
        before: naming.Contents = {}

        def publish(votes: dict[int, bytes]) -> bytes:
            del votes
            naming.publish(staged, target, before, replace=replace)
            try:
                if retain is not None:
                    retain()
            except OSError as error:  # this checkpoint stands nevertheless
                log.warning("an old checkpoint could not be deleted: %s", error)
            return b""

        def end(failure: BaseException | None) -> None:
            try:
                settle(world, f"{name}/end", failure or _synced(staged.parent), b"", publish)
            except BaseException:
                if world.rank == 0:
                    with contextlib.suppress(OSError):  # the next run removes the rest
                        naming.clear(staged, target.parent)
                raise
            finally:
                self._under_way.discard(final)
                pending.close()  # its lock said that the folder is not abandoned

        save = self.files.transaction(f"the checkpoint {final}", end)
        save.made = target if world.rank == 0 else None
        failed = list[OSError]() if self.files.settings.on_error == "warn" else None
        self._under_way.add(final)
        in_flight = {p: s for p, s in self.snapshots.items() if not all(map(has_ended, s))}
        self.snapshots = in_flight | {final: save.written}
        try:
            with self.files.ending(save, pending):
                with looks.unwatched(), small_files.collected(final, failed):
                    pending.begin()
                    naming.refuse(target)
                    staged.mkdir(exist_ok=True)
                    if world.rank == 0:
                        before = naming.contents(target)
                whole = meets and world.size > 1
                if not failed or whole:
                    with small_files.written(staged, final, failed, whole=whole):
                        write(staged, save.written)
                if failed:
                    raise failed[0]
                older = None if retain is None else naming.numbered(target.name)
                save.shown = looks.whole(target, save.see, older, room)
        except OSError as error:
            if not failed or error is not failed[0]:
                raise
        if needed is not None:
            self.files.show(final.name, needed)

    @contextlib.contextmanager
    def writing_tensors(
        self,
        functions: Mapping[str, ModuleType],
        folder: Path,
        lazy: Lazy,
        snapshots: list[Snapshot],
    ) -> Iterator[None]:
        """A context in which safetensors' ``save_file`` only begins to write files below a folder.

        Args:
            functions: The names that libraries call ``save_file`` by, each with the module that it is looked up in.
            folder: The folder.
            lazy: Chooses the tensors that are captured while training goes on; the others are copied.
            snapshots: The list that takes the files' snapshots.
        """

        def make(stock: Function) -> Function:
            def save(
                tensors: dict[str, torch.Tensor],
                filename: str | os.PathLike[str],
                metadata: dict[str, str] | None = None,
            ) -> None:
                path = Path(filename)
                if path.is_relative_to(folder):
                    snapshots.append(self.files.write_tensors(tensors, path, metadata or {}, lazy))
                else:
                    stock(tensors, filename, metadata)

            return save

        with contextlib.ExitStack() as stack:
            for name, module in functions.items():
                stack.enter_context(standing_in(module, name, make))
            yield

    def has(self, final: Path) -> bool:
        """Whether a checkpoint is there or under way."""
        with looks.unwatched():
            return final in self._under_way or final.exists()

    def wait(self) -> None:
        """Wait until every checkpoint has ended: it has its name, or has failed."""
        self.files.wait()

    def waiting_before(self, stock: Function) -> Function:
        """Wrap a framework's function: it first waits for every checkpoint of the process."""
        return instead_of(_wait_and_call, stock)

    def closing_before(self, stock: Function) -> Function:
        """Wrap a framework's function that ends the training: it first closes the checkpoints."""
        return instead_of(self._close_and_call, stock)

    def _close_and_call(self, stock: Function) -> None:
        try:
            self.close()
        finally:
            stock()

    def close(self) -> None:
        """As :meth:`free`; then wait until what has ended is in its tiers, but not for a tier that fails."""
        try:
            self.free()
        finally:
            self.files.close()

    def free(self) -> None:
        """Wait until every checkpoint has ended, then free threads and memory; the next one allocates them again.

        Raises:
            DatastatesError: With ``on_error="raise"``, a checkpoint has failed and this was not raised yet.
        """
        try:
            self.files.free()
        finally:
            self.sharded.close()
            if self._world is not None:
                self._world.close()
            self._world = None

    def _prepare(self, room: Path, target: Path) -> World:
        """The ranks that save together. Rank 0 first removes debris of folders whose names differ in numbers only."""
        if self._world is None:
            self._world = world_of(None, None, Location(room), self._timeout)
        names = naming.alike(target.name)
        if self._world.rank == 0 and (room, names) not in self._swept:
            self._swept.add((room, names))
            naming.sweep(room, names, target.parent)
        return self._world


def refuse_to_attach(saves: Any, method: str, reasons: Iterable[tuple[object, str]]) -> None:
    """Raise ValueError if ``attach()`` was called before for an object, or if its checkpoints cannot be saved lazily.

    Args:
        saves: The framework's object that saves.
        method: The name of a method of it that ``attach()`` replaces.
        reasons: For each reason against it, whether the reason holds, and the text for the message.
    """
    attached = isinstance(getattr(getattr(saves, method, None), "__self__", None), FolderCheckpoints)
    for holds, why in ((attached, "attach() has been called for it already"), *reasons):
        if holds:
            raise ValueError(f"{type(saves).__name__} cannot save lazily: {why}")


def _wait_and_call(stock: Function, *words: Any, **options: Any) -> Any:
    in_flight.wait_for_all()  # loading copies over the state, and the last folder may not have its name yet
    return stock(*words, **options)


def _synced(folder: Path) -> BaseException | None:
    """Put a folder and its files on stable storage; returns the error that prevented it, or None."""
    try:
        naming.sync(folder)
    except OSError as error:
        return error
    return None
