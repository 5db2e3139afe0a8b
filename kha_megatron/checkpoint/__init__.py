"""Folders on disk, read and written without Megatron."""
