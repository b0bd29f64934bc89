"""Training: loop, optimisers, checkpoints, evaluation, reports."""
