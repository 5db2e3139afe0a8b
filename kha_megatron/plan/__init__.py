"""Counts, work, memory and layouts on paper."""
