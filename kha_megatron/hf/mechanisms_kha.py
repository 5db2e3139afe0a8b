"""All head mechanisms other than KHA, in the order in which they are applied."""

from kha_megatron.heads.registry import mechanism_types as mechanism_types
