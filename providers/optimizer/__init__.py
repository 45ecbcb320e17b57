"""Providers of optimizers. States that ranks share out are described as logical tensors."""
