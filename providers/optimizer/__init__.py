"""The state of sharded optimizers, as logical tensors."""
