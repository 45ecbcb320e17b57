"""How containers become a checkpoint: manifest, catalog, votes, directories."""

from datastates.commit.ballot import Ballot, Vote
from datastates.commit.catalog import Catalog
from datastates.commit.directories import committed, find, reading
from datastates.commit.ending import Ending
from datastates.commit.manifest import Manifest

__all__ = ["Ballot", "Catalog", "Ending", "Manifest", "Vote", "committed", "find", "reading"]
