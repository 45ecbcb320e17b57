"""The keys by which chunks of tensors are named in a container."""

from __future__ import annotations

from torch.distributed.checkpoint.metadata import MetadataIndex

AGAIN = "~"
NAME = "state"
"""What the provider is called: the containers' keys are ``state/`` and the names of the state dict."""


def key_of_chunk(index: MetadataIndex) -> str:
    """The key of a part of a tensor of which a rank holds several."""
    return index.fqn if index.offset is None else f"{index.fqn}@{','.join(map(str, index.offset))}"


def is_key_of(key: str, index: MetadataIndex) -> bool:
    """Whether that is what a file calls it."""
    known = (index.fqn, key_of_chunk(index))
    return key[len(NAME) + 1 :] in known or key[len(NAME) + 1 :].rstrip(AGAIN) in known
