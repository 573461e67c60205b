"""Training: the loop of every run (`loop.py`), image classification (`classification.py`) and `denoising`; the
optimizer step (`update.py`), checkpoints, processes and the metrics of a run."""
