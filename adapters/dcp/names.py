"""The keys of tensors and their chunks in a container."""

from __future__ import annotations

from torch.distributed.checkpoint.metadata import MetadataIndex

AGAIN = "~"
NAME = "state"
"""Name of the provider: a key in the container is ``state/`` and the name in the state dict."""


def key_of_chunk(index: MetadataIndex) -> str:
    """The key of one chunk of a tensor, for a rank that holds several."""
    return index.fqn if index.offset is None else f"{index.fqn}@{','.join(map(str, index.offset))}"


def is_key_of(key: str, index: MetadataIndex) -> bool:
    """Whether a container's key names the item with this index."""
    known = (index.fqn, key_of_chunk(index))
    return key[len(NAME) + 1 :] in known or key[len(NAME) + 1 :].rstrip(AGAIN) in known
