"""Implementation of ``kha-megatron compare``."""

from kha_megatron.compare.page import render_page, summarize
from kha_megatron.compare.report import build_report
from kha_megatron.compare.runs import Comparison, Trial, plan_comparison
from kha_megatron.compare.variants import parse_variants

__all__ = [
    "Comparison",
    "Trial",
    "build_report",
    "parse_variants",
    "plan_comparison",
    "render_page",
    "summarize",
]
