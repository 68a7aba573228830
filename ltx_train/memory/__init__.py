"""Fitting a model onto a card: quantisation, block streaming, activations."""
