"""Conversion recipes: all stages from a softmax model to its fine-tuned and evaluated conversion."""
