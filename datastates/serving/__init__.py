"""Hands the weights of training checkpoints to engines that serve models."""
