"""Tiny checkpoints and media in the real layouts, for the demo and tests."""
