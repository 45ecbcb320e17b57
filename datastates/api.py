"""Functions that need no :class:`Checkpointer`: to snapshot, restore, compare, load, open and export."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from typing_extensions import Unpack

from datastates.commit.ballot import Ballot
from datastates.commit.names import checked_step
from datastates.commit.newest import Given
from datastates.commit.run import Run
from datastates.commit.tiers import sweep_beside, tier_of
from datastates.config import IoOptions, IoSettings, RankOptions, RankSettings
from datastates.container.pickle_reader import Trust
from datastates.executor.executor import Executor
from datastates.executor.make import make_executor
from datastates.exporting import export as exporting
from datastates.exporting.export import Exported
from datastates.exporting.request import ExportRequest
from datastates.formats import recognise
from datastates.formats.seen import Seen
from datastates.formats.together import origin_of
from datastates.ranks.world import SoloWorld, World, meet, open_world
from datastates.reading.checkpoint import Checkpoint
from datastates.reading.needed_memory import refuse_too_large
from datastates.reading.request import ReadRequest
from datastates.restoring import requested
from datastates.restoring.meeting import attempts, refuse_to_meet, refuse_to_restore, telling
from datastates.restoring.renaming import Renames
from datastates.restoring.request import CompareOptions, RestoreOptions, divide
from datastates.restoring.requested import Origin
from datastates.restoring.restored import Comparison, Restored
from datastates.saving import gate
from datastates.saving.engine import take_one
from datastates.saving.snapshot import Snapshot
from datastates.state.new_memory import AS_SAVED, Device, Framework
from datastates.state.provider import StateProvider, refuse_path
from datastates.state.pytrees import is_leaf
from datastates.storage.location import Location, PathLike


class _CompareArguments(CompareOptions, RankOptions, total=False):
    """The keyword arguments of :func:`compare`."""


class _RestoreArguments(RestoreOptions, RankOptions, total=False):
    """The keyword arguments of :func:`restore`."""


def snapshot(
    providers: Sequence[StateProvider],
    path: PathLike,
    *,
    step: int = 0,
    auto_gate: bool = True,
    **options: Unpack[RankOptions],
) -> Snapshot:
    """Write one checkpoint directory at ``path``, without a :class:`Checkpointer`. All ranks call it together.

    It returns when everything that is not lazy has been copied, as :meth:`Checkpointer.snapshot` does. The exit of the
    interpreter waits for the commit. Before other code than a torch optimizer updates lazy state, wait with
    :meth:`Snapshot.wait_captured`.

    Args:
        providers: The state, one provider for each piece of it. Their names must differ.
        path: The directory, or an address such as ``"s3://bucket/run"``, which must not exist. It appears when the
            checkpoint is committed.
        step: The number to store with the checkpoint, from 0 to 10**18 - 1.
        auto_gate: Let every torch optimizer's ``step()`` wait for capture.
        **options: Fields of :class:`~datastates.config.RankSettings`.

    Returns:
        The snapshot. Failures of storage, of devices or of other ranks make it fail, and are not raised here.

    Raises:
        FileExistsError: ``path`` exists. With several ranks it is a CommitError.
        SettingsError: An option is unknown or impossible.
        ProviderError: A provider describes its state wrongly, or an object does not pickle.
        TypeError, ValueError: Another argument is impossible.
        CommitError: Another rank failed before it began to save, or the ranks gave different paths.
        RanksMissingError: Some ranks did not call it within ``rank_timeout`` seconds.
        StorageError: The directory around ``path`` cannot be listed, or cleaned of debris of interrupted runs.
    """
    name = "snapshot"
    with telling(lambda: Location.of(path).parent, options, partial(refuse_to_meet, name)):
        settings = RankSettings.of(options)
        refuse_path(providers)
        target, step = Location.of(path), checked_step(step)
        tier = tier_of(target.parent)
    world = open_world(settings, target.parent)

    def prepare() -> bytes:
        if tier.is_taken(target):
            raise FileExistsError(f"{target} exists, and is not written over: delete it or choose another path")
        sweep_beside(target)
        return b""

    try:
        meet(world, name, str(target), prepare)
        ballot = Ballot(world, f"{name}/commit", Run(tier), step=step, target=target)
    except BaseException:
        world.close()
        raise
    return take_one(settings, providers, world, ballot, auto_gate=auto_gate)


def restore(providers: Sequence[StateProvider], path: PathLike, **options: Unpack[_RestoreArguments]) -> Restored:
    """Restore one checkpoint in place, without a :class:`Checkpointer`. All ranks call it together.

    Args:
        providers: The state to restore, as for :meth:`Checkpointer.restore`.
        path: A checkpoint directory, a directory of them, or a checkpoint of another format. Of another format, arrays
            are restored by their names, and objects that only a provider can take back are missing.
        **options: Fields of :class:`~datastates.RestoreRequest`: ``step``, ``keys``, ``rename``, ``cast``, ``strict``,
            ``trust``, ``verify`` and ``fallback``. And fields of :class:`~datastates.config.RankSettings`.

    Returns:
        The result of the restore, with the step and the restored keys.

    Raises:
        CheckpointNotFoundError: There is no committed checkpoint, or none of that step.
        SettingsError: An option is unknown or impossible.
        DatastatesError: The other errors are those of :meth:`Checkpointer.restore`.
    """
    name, known = "restore", sorted(RestoreOptions.__optional_keys__)
    request, settings = divide(options, known)
    with _met(name, providers, path, settings, known, gate.pass_all) as (executor, given, origin, world):
        restored = requested.restore(origin, providers, request, attempts(world, name), executor)
    return recognise.refuse_absence(given, request.get("step")) if restored is None else restored


@contextlib.contextmanager
def _met(
    name: str,
    providers: Sequence[StateProvider],
    path: PathLike,
    options: Mapping[str, Any],
    known: Sequence[str],
    wait: Callable[[], None] = lambda: None,
) -> Iterator[tuple[Callable[[int], Executor], Location, Origin, World]]:
    """Yield a maker of executors, the path, what is restored from it, and the ranks that restore.

    ``wait`` is called before the path is looked at: what is committed meanwhile is found.
    """
    with telling(lambda: recognise.meeting_place(Seen(Location.of(path))), options, partial(refuse_to_restore, name)):
        settings = RankSettings.of(options, known)
        refuse_path(providers)
        given = Location.of(path)
        wait()
        origin = origin_of(seen := Seen(given))
    with contextlib.closing(open_world(settings, recognise.meeting_place(seen))) as world:
        yield partial(make_executor, settings), given, origin, world


def compare(providers: Sequence[StateProvider], path: PathLike, **options: Unpack[_CompareArguments]) -> Comparison:
    """Find out what :func:`restore` would do with the same arguments. Reads only the data for that; changes nothing.

    ``print()`` of the result has a line for each key. All ranks call it together.

    Args:
        providers: The state that would be restored.
        path: As for :func:`restore`.
        **options: Fields of :class:`~datastates.RestoreRequest`: ``step``, ``keys``, ``rename``, ``cast`` and
            ``trust``. And fields of :class:`~datastates.config.RankSettings`.

    Returns:
        The keys that would be restored, cast, and left as they are.

    Raises:
        CheckpointNotFoundError: There is no committed checkpoint, or none of that step.
        SettingsError: An option is unknown or impossible.
        RestoreError: A glob or a rename matches nothing, or the ranks gave different ones.
        DatastatesError: The other errors are those of :meth:`Checkpointer.restore`.
    """
    name, known = "compare", sorted(CompareOptions.__optional_keys__)
    request, settings = divide(options, known)
    with _met(name, providers, path, settings, known) as (executor, given, origin, world):
        found = requested.compare(origin, providers, request, attempts(world, name)(0), executor)
    return recognise.refuse_absence(given, request.get("step")) if found is None else found


def load(
    path: PathLike,
    *,
    step: int | None = None,
    like: Mapping[str, Any] | None = None,
    framework: Framework | None = None,
    device: Device = "cpu",
    trust: Trust = (),
    **options: Unpack[IoOptions],
) -> Any:
    """Read a whole checkpoint as nested arrays and objects, without providers. Everything read is verified.

    Parts that several ranks saved are put together into whole tensors; a single container file gives its parts as
    tensors of their own shapes. Of other values that several ranks saved under one key, the lowest rank's value is
    returned. Each process reads by itself: no other rank takes part.

    The call needs memory for all arrays, and the host cache. A line of the log (DEBUG) says how much the arrays need.
    Ranks of one host that load at the same time each see the same free memory, and do not count each other's needs.

    If the newest checkpoint of a directory is damaged, the message of the error names an older one that looks whole.

    Args:
        path: A checkpoint directory, a directory of them, one container file, or a checkpoint of another format.
        step: In a directory of checkpoints, the step to read; None reads the newest. For a single checkpoint or file,
            the step that it must have; None accepts any.
        like: For each provider to read, by its name, a tree of arrays or ``jax.ShapeDtypeStruct`` as
            :func:`~datastates.providers.from_pytree` takes it. Only the parts that this process holds are read. In a
            checkpoint of another format, arrays are found by their names, as :func:`restore` finds them; ``like`` may
            then also be a dict of arrays by these names.
        framework: ``"pt"`` for tensors of torch, ``"np"`` for NumPy arrays, as in ``safetensors.safe_open``. ``"np"``
            imports no torch; parameters, and tensors that require a gradient, are then plain arrays. None: an array
            that came from torch is a tensor if torch is installed, which is then imported, and a NumPy array if not;
            all others are NumPy arrays.
        device: The device of torch tensors: ``"cpu"``, or a CUDA device such as ``"cuda"``, ``"cuda:1"`` or ``1``.
            Tensors on a device need no host memory but the host cache.
        trust: As for :meth:`Checkpointer.restore`.
        **options: Fields of :class:`~datastates.config.IoSettings`.

    Returns:
        A dict with the value of each provider, by the name that it is stored under. Torch tensors are on ``device``,
        NumPy arrays in host memory, if need be of a type of ml_dtypes. For a checkpoint of another format: the tensors
        by name, or the value of a file of ``torch.save``, whatever it is. With ``like``, its trees with new arrays: of
        its types, on its devices, and with its shardings.

    Raises:
        ValueError: There is no such framework or device, or a device is given with ``"np"``, or one of them with
            ``like``.
        RestoreError: The checkpoint does not fit ``like``; the message has each key with both values.
        TrustError: An object needs a class that is not trusted.
        OutOfMemoryError: The arrays need more memory than is free, with swap space, or than the limits of control
            groups leave. Nothing was read. With ``like``, nothing is checked.
        CorruptError: A tensor or object does not match its checksum; the message names it.
        FormatError: A file is damaged, or of no known format. Or elements of a tensor were not saved. Or keys share
            memory on one rank, but are different tensors, which only :func:`open` tells apart.
        StorageError: A file is missing or cannot be read.
        CheckpointNotFoundError: There is no committed checkpoint, or none of that step.
        SettingsError: An option is unknown or impossible.
        ImportError: An element type needs torch or ml_dtypes and neither is installed, the framework lacks it, or an
            object is of torch and ``framework`` is ``"np"``. The message names it.
    """
    executor = partial(make_executor, IoSettings.of(options))
    request = ReadRequest.of(step, framework, device, trust)
    if like is not None:
        if request.into != AS_SAVED:
            raise ValueError(f"like: its arrays say what they are, beside framework={framework!r}, device={device!r}")
        return _load_like(Location.of(path), like, executor, {"step": request.step, "trust": trust})
    with recognise.opened(path, request.step) as found:
        refuse_too_large(found.tensors.path, found.files, request.into)
        return found.load(executor, trust=trust, into=request.into)


def _load_like(
    path: Location, like: Mapping[str, Any], executor: Callable[[int], Executor], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Read trees into new arrays like the arrays in ``like``; arguments and errors as for :func:`load`."""
    from datastates.providers.pytree import from_pytree

    if not isinstance(like, Mapping):
        raise TypeError(f"like: a tree for each provider's name is wanted, not a {type(like).__name__}")
    gate.pass_all()  # before the look: what is committed meanwhile is found
    origin = origin_of(Seen(path))
    # the names in a file of safetensors, say: no provider's name is in front of them
    is_bare = not isinstance(origin, Given) and all(is_leaf(tree) for tree in like.values())
    trees = {"like": dict(like)} if is_bare else like
    providers = [from_pytree(name, tree) for name, tree in trees.items()]
    meetings = attempts(SoloWorld(), "load")
    if requested.restore(origin, providers, options, meetings, executor) is None:
        recognise.refuse_absence(path, options["step"])
    found: dict[str, Any] = {provider.name: provider.tree for provider in providers}
    return found["like"] if is_bare else found


def export(
    source: PathLike,
    target: PathLike,
    *,
    step: int | None = None,
    keys: str | Sequence[str] = "*",
    rename: Renames = MappingProxyType({}),
    dtype: object = None,
    shard_size: str | int | None = None,
    progress: Callable[[int, int], object] | None = None,
    **options: Unpack[IoOptions],
) -> Exported:
    """Write the tensors of a checkpoint as safetensors, the format of Hugging Face's tools, or for ``torch.load``.

    Parts that several ranks saved are put together. All data that is read is verified by its checksums, and written
    data is compared with each tensor's digest: when this returns, the copy is proven. Tensors of other formats that
    have no checksum are listed as not proven. It needs the host cache and 64 MiB of memory, whatever the size of the
    checkpoint. The target appears when it is complete and on stable storage. An interrupted export leaves a folder
    ``TARGET.partial-…``, which the next export to that target deletes.

    A tensor is named as its full key without the provider's name if all exported tensors belong to one provider, and as
    its full key if not. Of tensors that are the same memory, safetensors files hold the first, and the names of the
    others in the metadata, as ``safetensors.torch.save_model`` does it. A file for ``torch.load`` holds a flat dict of
    all names, as a module's ``state_dict()`` is; tensors that are the same memory share their storage in it.

    Args:
        source: As ``path`` for :func:`load`.
        target: A path that ends in ``.safetensors`` is one file. A path that ends in ``.pt``, ``.pth``, ``.bin`` or
            ``.ckpt`` is a file that ``torch.load`` opens, also with ``mmap=True`` and ``weights_only=True``. Any other
            path is a folder, which must not exist or must be empty: it gets ``model.safetensors``, or several files
            with ``model.safetensors.index.json``. Of an address in a store, the same ends make objects.
        step: As for :func:`load`.
        keys: Selects tensors: a glob of full keys as in a shell, such as ``"model/*"``, or several globs.
        rename: New names. A string replaces a prefix of that text; a compiled pattern is replaced as by ``re.sub``. The
            first that matches a name is used.
        dtype: The type that floating-point tensors are cast to: ``"bf16"``, ``"fp16"``, ``"fp32"`` or a torch type.
            None keeps each tensor's own.
        shard_size: Most bytes of tensors in a file of a folder, such as ``"5GB"`` (the default) or ``"512MiB"``.
        progress: Called after each write with the number of bytes written by it, and the number of all bytes. It is
            called on another thread.
        **options: Fields of :class:`~datastates.config.IoSettings`.

    Returns:
        A description of the written files, and of the keys that were left out.

    Raises:
        FileExistsError: ``target`` exists.
        ValueError: A glob or a rename matches nothing, two tensors would get one name, a tensor is of a type that
            safetensors lacks, or another argument is impossible.
        CorruptError: A tensor does not match its checksum or its digest; the message names it.
        FormatError: A file is damaged, or of no known format.
        StorageError: A file is missing or cannot be read, or the target cannot be written.
        CheckpointNotFoundError: There is no committed checkpoint, or none of that step.
        SettingsError: An option is unknown or impossible.
        ImportError: An element type needs torch or ml_dtypes and neither is installed.
    """
    request = ExportRequest.of(target, step=step, keys=keys, rename=rename, dtype=dtype, shard_size=shard_size)
    return exporting.export(source, request, IoSettings.of(options), progress)


def open(
    path: PathLike,
    *,
    step: int | None = None,
    framework: Framework | None = None,
    device: Device = "cpu",
    **options: Unpack[IoOptions],
) -> Checkpoint:
    """Open a checkpoint to read single arrays: a mapping of full keys to arrays, each read when it is accessed.

    Retention does not delete a checkpoint directory while it is open. The containers of several ranks are opened when
    they are needed. Each process reads by itself: no other rank takes part.

    Args:
        path: As for :func:`load`.
        step: As for :func:`load`.
        framework: As for :func:`load`.
        device: As for :func:`load`.
        **options: Fields of :class:`~datastates.config.IoSettings`.

    Returns:
        The mapping; close it, or use it in a ``with`` block.

    Raises:
        ValueError: There is no such framework or device, or a device is given with ``"np"``.
        FormatError: A file is damaged. If it belongs to the newest of several checkpoints, the message names an older
            one that looks whole.
        StorageError: A file is missing or cannot be read.
        CheckpointNotFoundError: There is no committed checkpoint, or none of that step.
        SettingsError: An option is unknown or impossible.
    """
    settings, request = IoSettings.of(options), ReadRequest.of(step, framework, device)
    with contextlib.ExitStack() as reading:
        found = reading.enter_context(recognise.opened(path, request.step))
        return Checkpoint(found.tensors, partial(make_executor, settings), reading.pop_all(), request.into)
