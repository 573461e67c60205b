"""Evaluation: accuracy, other labels of ImageNet, paired intervals, result files and attention pictures."""
