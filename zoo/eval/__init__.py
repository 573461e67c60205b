"""Evaluation of classifiers (accuracy, attention) and of diffusion models (samples and their scores)."""
