"""Triton kernels for KHA, their tile sizes and launchers."""
