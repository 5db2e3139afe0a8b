"""Estimate parameters, FLOPs, memory and communication, and search for parallel layouts."""
