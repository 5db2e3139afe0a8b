"""Implementation of ``kha-megatron compare``."""
