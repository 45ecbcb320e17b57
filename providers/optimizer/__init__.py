"""Optimizer states that ranks share out, described as logical tensors."""
