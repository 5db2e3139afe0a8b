"""Readers and writers for Megatron and Hugging Face checkpoints (Megatron isn't needed)."""
