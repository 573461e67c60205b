"""The campaign of attacks.

Not collected by pytest but for a smoke test; `make campaign` or `python -m tests.campaign --help` runs it.
"""
