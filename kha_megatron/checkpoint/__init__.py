"""Readers and writers for Megatron and Hugging Face checkpoints (Megatron is not needed)."""
