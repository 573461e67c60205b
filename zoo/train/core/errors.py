"""Errors of a run that end it in one sentence: a damaged checkpoint, a training that failed."""


class DamagedCheckpoint(ValueError):
    """A checkpoint with a file that is missing, damaged, or not of the same step, run or model as the others."""


class TrainingFailed(ValueError):
    """A run that cannot go on or must not count as done: losses, gradients or weights that are not finite."""
