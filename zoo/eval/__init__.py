"""Evaluation: accuracy, other labels of ImageNet, paired intervals, attention, samples and their scores (`fid`)."""
