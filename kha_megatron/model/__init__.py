"""Typed description of a training run: model config, parallel layout, batch and arguments."""
