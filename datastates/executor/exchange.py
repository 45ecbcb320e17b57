"""What ranks of one host read for each other: the interface to the native core."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import numpy as np

from datastates import _native
from datastates._base.columns import I64, as_u64
from datastates.state.runs import Runs

Exchange = _native.Exchange
FIRST_PEER = -2
"""The device number that stands for the first peer in a read's destinations; that of the next one is lower by 1."""


def begin(sockets: Sequence[socket.socket], rows: Sequence[tuple[I64, Runs]], patience: float) -> Exchange:
    """Begin to receive what peers send.

    Args:
        sockets: A connection to each peer. The result takes them over.
        rows: For each peer, what its parcel fills, in order: the address of each run's destination, and the runs.
        patience: Seconds after which a peer is given up that sends, or takes, nothing.
    """
    for one in sockets:
        one.setblocking(True)
    runs = Runs.joined([runs for _, runs in rows])
    pointer = np.concatenate([pointer for pointer, _ in rows])
    return _native.Exchange(
        [one.detach() for one in sockets],
        peer_rows=as_u64(np.append(0, np.cumsum([len(runs) for _, runs in rows]))),
        ptr=as_u64(pointer + runs.dest),
        length=as_u64(runs.length),
        count=as_u64(runs.count),
        step=as_u64(runs.dest_step),
        patience=patience,
    )
