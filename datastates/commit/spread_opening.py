"""Opens the directories that each host has for itself, on all ranks together."""

from __future__ import annotations

from datastates._base.packing import pack, unpack
from datastates.commit.fence import DirectoryOpening
from datastates.commit.hosts import find, together
from datastates.commit.spread_tier import SpreadTier
from datastates.commit.stock import Stock
from datastates.ranks.world import World
from datastates.storage.location import Location


def open_spread(world: World, name: str, root: Location, beside: str) -> tuple[SpreadTier, DirectoryOpening]:
    """Open the directories ``root`` of all hosts, on all ranks; what was committed on some of them is completed.

    ``beside`` must be the same on all ranks.

    Raises:
        CommitError: Another rank failed.
        RanksMissingError: Some ranks did not come in time.
        StorageError: The directory cannot be read or written.
    """
    hosts = find(world, name, root, beside)
    tier = SpreadTier(root, hosts, None if world.place is None else world.place.link)
    leads = hosts.leader == world.rank

    def own() -> bytes:
        return pack([tier.begin_opening(), tier.inventory()]) if leads else b""

    def unite(told: dict[int, bytes]) -> bytes:
        given = {leader: unpack(data) for leader, data in told.items() if data}
        stock = Stock.united({leader: unpack(held) for leader, (_, held) in given.items()})
        return pack([[[leader, begun] for leader, (begun, _) in given.items()], stock.encode()])

    told, encoded = unpack(together(world, f"{name}/stock", own, unite))
    opening = tier.opening(dict(told)[hosts.leader])
    if behind := (stock := Stock.decode(encoded)).behind:

        def give() -> bytes:
            return pack(tier.files_of([identity for identity, leader in behind if leader == world.rank]))

        def collect(given: dict[int, bytes]) -> bytes:
            return pack([one for data in given.values() for one in unpack(data)])

        files = [((*i,), *rest) for i, *rest in unpack(together(world, f"{name}/behind", give, collect))]

        def complete() -> bytes:
            if not leads:
                return b""
            tier.roll_forward(files, opening.mark)
            return pack([b"", tier.inventory()])

        _, encoded = unpack(together(world, f"{name}/completed", complete, unite))
        stock = Stock.decode(encoded)
    tier.take_stock(stock.known)
    return tier, opening
