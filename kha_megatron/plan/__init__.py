"""Parameter counts, FLOPs and GPU memory of a run, computed without building the model."""
