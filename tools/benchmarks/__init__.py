"""Benchmarks: speed of the two-sided operators and of whole models on one GPU against what else exists, on the same
tensors, and quality of mixers that were trained or converted (`quality.py`).

Reading order: shapes (what is timed, floors, targets), formulas (operators in plain torch), peers (who is timed), check
(errors against float64), timing, operators and models (their tables), rows (result files), report and plots.
"""
