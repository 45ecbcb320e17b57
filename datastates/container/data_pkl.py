"""Encodes ``data.pkl``: for a container, the pickles of all providers spliced into one; or for a plain torch file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from datastates.container import pickle_writer
from datastates.container.checksums import crc32
from datastates.container.index import StoredObject
from datastates.state.shards import StoredArray


@dataclass(frozen=True, slots=True)
class ProviderState:
    """One provider's part of ``data.pkl``.

    Attributes:
        name: The provider's name: a top-level key.
        whole: The pickle of its whole value; None when the value is a mapping made of ``items``.
        items: Each key with the pickle of an object, or with the place of a stored array.
    """

    name: str
    whole: bytes | None
    items: tuple[tuple[str, bytes | StoredArray], ...] = ()


def encode_pickle(
    states: Sequence[ProviderState], offset: int, *, bare: bool = False
) -> tuple[bytes, tuple[StoredObject, ...]]:
    """Splice the providers' pickles into one ``data.pkl``. Returns it, and the place of each object in the file.

    Args:
        states: The providers, in the order of the index.
        offset: File offset of the data of ``data.pkl``.
        bare: Whether ``data.pkl`` is the value of the only provider rather than a mapping of providers.
    """
    parts = [pickle_writer.stream(b"")[:-1]]
    position = offset + sum(map(len, parts))
    objects = []

    def add(data: bytes) -> None:
        nonlocal position
        parts.append(data)
        position += len(data)

    def add_object(provider: int, key: str, stream: bytes) -> None:
        spliced = pickle_writer.body(stream)
        objects.append(StoredObject(provider, key, position, len(spliced), crc32(spliced)))
        add(spliced)

    if bare:
        (state,) = states
        assert state.whole is not None
        add_object(0, "", state.whole)
        add(pickle_writer.END)
        return b"".join(parts), tuple(objects)
    add(pickle_writer.MAPPING_BEGIN)
    for number, state in enumerate(states):
        add(pickle_writer.text(state.name))
        if state.whole is not None:
            add_object(number, "", state.whole)
            continue
        add(pickle_writer.MAPPING_BEGIN)
        for key, item in state.items:
            add(pickle_writer.text(key))
            if isinstance(item, bytes):
                add_object(number, key, item)
            else:
                add(pickle_writer.encode_array(item))
        add(pickle_writer.MAPPING_END)
    add(pickle_writer.MAPPING_END + pickle_writer.END)
    return b"".join(parts), tuple(objects)


def encode_arrays(arrays: Mapping[str, StoredArray]) -> bytes:
    """Encode a ``data.pkl`` that is one dict of arrays. Arrays at the same place share their storage when loaded."""
    items = (pickle_writer.text(key) + pickle_writer.encode_array(one) for key, one in arrays.items())
    return pickle_writer.stream(b"".join([pickle_writer.MAPPING_BEGIN, *items, pickle_writer.MAPPING_END]))
