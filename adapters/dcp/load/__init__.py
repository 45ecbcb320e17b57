"""The storage reader, of this package's files and of torch's own."""
