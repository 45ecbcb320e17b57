"""DeepSpeed's checkpoints, loaded on another number of ranks."""
