"""Training of diffusion transformers."""
