"""Read and write checkpoint directories without Megatron."""
