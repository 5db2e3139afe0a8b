"""Triton kernels that knock, their tilings and their launchers."""
