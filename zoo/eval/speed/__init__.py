"""Speed: the two-sided operators and whole models on one GPU against what else exists, on the same tensors.

Reading order: shapes (what is timed, floors, targets), formulas (operators in plain torch), peers (who is timed), check
(errors against float64), timing, kernels (the operator table), models (the model table), rows (result files), report
and pictures.
"""
