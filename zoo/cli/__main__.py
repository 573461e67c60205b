"""`python -m zoo.cli`, for launchers that start modules."""

from zoo.cli import entry

entry()
