"""Triton's kernels of knocking and of the prologue, how they are cut, and what starts them."""
