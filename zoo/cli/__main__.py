"""Entry point of `python -m zoo.cli`, for launchers that start a module."""

from zoo.cli import entry

entry()
