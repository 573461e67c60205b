"""Training of diffusion transformers: data, model, teacher, layerwise distillation, dry run, and the run."""
