"""Reads tensors of a checkpoint, and their bytes, into new memory or into live arrays. Knows no providers."""
