"""Training of diffusion transformers: objective (noising), data, model, teacher, sample grids, and the loop."""
