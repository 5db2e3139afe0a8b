"""Triton kernels for KHA."""
