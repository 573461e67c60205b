"""Training: model and weights (model), optimiser (optim), losses, checkpoints, the record of a run, and the loop."""
