"""Makes one checkpoint of the ranks' containers, and finds the newest: manifest, catalog, votes, directories."""

from datastates.commit.ballot import Ballot, Vote
from datastates.commit.catalog import Catalog
from datastates.commit.ending import Ending
from datastates.commit.manifest import Manifest
from datastates.commit.newest import committed, find
from datastates.commit.protection import reading

__all__ = ["Ballot", "Catalog", "Ending", "Manifest", "Vote", "committed", "find", "reading"]
