"""Train variants of a recipe side by side and report their differences."""

from kha_megatron.compare.page import render_page
from kha_megatron.compare.report import summarise
from kha_megatron.compare.runs import Comparison, Trial, plan
from kha_megatron.compare.variants import parse_variants

__all__ = ["Comparison", "Trial", "parse_variants", "plan", "render_page", "summarise"]
