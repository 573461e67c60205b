"""A package of its own name: torch-fidelity installs another `tests`, which would hide a folder without this file."""
