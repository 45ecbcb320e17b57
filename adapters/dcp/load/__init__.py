"""The storage reader, for this package's files and for torch's own."""
