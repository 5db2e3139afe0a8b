"""The Megatron-Core glue."""

from kha_megatron.te_extension import hide_incomplete

hide_incomplete()  # before any module of this room imports Megatron
