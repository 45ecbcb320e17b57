"""Exports: the tensors of a checkpoint as files that other tools read. Container → planner → executor → file."""
