"""Reads containers ahead that are probably wanted whole, while they are compared with the live state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from datastates.executor.executor import Executor
from datastates.reading.reads import AHEAD_MINIMUM, Reads
from datastates.reading.stored import Stored
from datastates.restoring.meeting import Meeting
from datastates.state.devices import current_device
from datastates.state.provider import StateProvider, stored_name, walk_unique


def begin(
    own: Stored,
    providers: Sequence[StateProvider],
    meeting: Meeting,
    make_executor: Callable[[int], Executor],
    reads: Reads,
    choose: Callable[[Sequence[int]], Iterable[int]],
) -> Executor | None:
    """Begin to read the containers that this rank probably wants whole, as far as the executor reads ahead.

    A rank wants its own container. If fewer ranks restore than saved, it wants its share of the containers. Nothing is
    read ahead in these cases:

    - The ranks cut their tensors in another way than they were saved: each wants some of each container.
    - CUDA is in use: the host cache must be page-locked first, which takes as long as the comparison.
    - The checkpoint consists of a framework's own files, which are no containers.

    Args:
        own: The checkpoint.
        providers: All providers that are restored.
        meeting: The meeting of the ranks.
        make_executor: Returns the executor to use, given the number of bytes that will be read.
        reads: Gets the read-aheads.
        choose: Given this rank's share of the ranks that saved, yields the ranks whose containers are probably wanted
            whole.

    Returns:
        The executor that reads; None if nothing is read ahead.
    """
    head = own.head
    if head.ranks % meeting.ranks or (head.container or head.catalog) is None or current_device() is not None:
        return None
    made, share = None, head.ranks // meeting.ranks
    for rank in choose(range(meeting.rank * share, (meeting.rank + 1) * share)):
        one = own.container(rank)
        names = {stored_name(provider, rank, head.ranks) for provider in walk_unique(providers)}
        if one is None or not names.issuperset(one.index.shards.providers) or one.nbytes * share < AHEAD_MINIMUM:
            break
        # this rank may want parts of other containers, too: each replicated tensor is in one container only
        made = made or make_executor(one.nbytes * head.ranks)
        if not reads.begin(one, made):
            break
    return made
