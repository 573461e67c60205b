"""Conversion recipes: all stages from a softmax model to a fine-tuned and evaluated linear model."""
