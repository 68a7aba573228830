"""Conditions that edit a LatentState, for training and sampling alike."""
