"""The campaign: attacks on command lines, options, running processes, folders, disks and operators.

Not collected by pytest but for a smoke test; `make campaign` or `python -m tests.campaign --help` runs it.
"""
