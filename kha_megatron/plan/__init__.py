"""Planner: parameter counts, FLOPs, memory and communication estimates, and layout search."""
