"""Typed configs for the model, parallel layout, batch and training arguments."""
