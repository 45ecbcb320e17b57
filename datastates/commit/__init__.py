"""Makes one checkpoint of the ranks' containers, and finds the newest: manifest, catalog, votes, directories."""
