"""Benchmarks on one GPU: speed of operators and models against peers, and quality of mixers.

Reading order: shapes (what is timed, floors, targets), formulas (operators in plain torch), peers (implementations),
check (errors against float64), timing, operators and models (their tables), host (host times), rows (result files),
report and plots, quality (trained or converted mixers).
"""
