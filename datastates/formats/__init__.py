"""Checkpoint formats: each is recognised by the contents of a path, and read by one protocol. One file per format."""
