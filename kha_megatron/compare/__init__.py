"""Variants of a recipe trained side by side, what their differences mean, and the report."""

from kha_megatron.compare.page import page
from kha_megatron.compare.report import summarise
from kha_megatron.compare.runs import Comparison, Trial, plan
from kha_megatron.compare.variants import Candidate, parse_variants

__all__ = ["Candidate", "Comparison", "Trial", "page", "parse_variants", "plan", "summarise"]
