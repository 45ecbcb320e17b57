"""Saves checkpoints that are files of a framework: begun, written, published and told of, each once."""
