"""Makes one checkpoint of the ranks' containers, and finds the newest: manifest, catalog, votes, directories."""

from datastates.commit.ballot import Ballot, Vote
from datastates.commit.catalog import Catalog
from datastates.commit.directory_tier import tier_of
from datastates.commit.ending import Ending
from datastates.commit.manifest import Manifest
from datastates.commit.newest import committed, find
from datastates.commit.tier import Tier

__all__ = ["Ballot", "Catalog", "Ending", "Manifest", "Tier", "Vote", "committed", "find", "tier_of"]
