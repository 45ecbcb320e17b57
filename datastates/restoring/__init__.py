"""Restores: all ranks choose a checkpoint, compare it with the live state, and take it back together or not at all."""
