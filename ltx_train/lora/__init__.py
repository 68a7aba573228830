"""Adapters, their files, and tools that edit those files."""
