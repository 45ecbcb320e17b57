"""Brings committed checkpoints into further tiers."""
