"""Metrics of snapshots and restores for OpenTelemetry, TensorBoard and Weights & Biases, a module for each."""
