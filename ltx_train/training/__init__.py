"""One training step, its objective, optimizers, snapshots and parallelism."""
