"""Takes snapshots: collects the shards of providers, plans the file, writes it and commits it."""
