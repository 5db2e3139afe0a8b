"""The Megatron-Core glue."""

from kha_megatron.mcore.compat import hide_incomplete_te

hide_incomplete_te()  # before any module of this room imports Megatron
