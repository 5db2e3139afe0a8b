"""Integration with Megatron-Core."""

from kha_megatron.mcore.compat import hide_incomplete_te

hide_incomplete_te()  # must run before the first import of Megatron
