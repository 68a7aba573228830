"""A run on disk: its directory, events, lock and publishers."""
