"""Providers around others: several as one, and one whose state all ranks hold alike."""
