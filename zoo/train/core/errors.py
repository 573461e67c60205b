"""Errors of a run that end it in one sentence: a damaged checkpoint, a training that failed."""


class DamagedCheckpoint(ValueError):
    """A checkpoint with a file that is missing, damaged, or not of the same step, run or model as the others."""
