"""Multipole attention."""
