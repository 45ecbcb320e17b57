"""Agreement between processes without collectives. Independent of checkpoints."""
