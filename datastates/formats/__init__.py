"""Formats: what a path holds, told by what is in it, as one protocol. One file for each format."""
