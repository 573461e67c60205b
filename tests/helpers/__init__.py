"""Shared by tests: tiny models and runs, tools as a user starts them, a hub."""
