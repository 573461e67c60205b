"""Diffusion models for training and evaluation: loading, objectives, schedulers, samplers and previews."""
