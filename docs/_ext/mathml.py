"""Formulas as MathML, which browsers draw themselves: no script, no font, no network."""

from typing import Any

from docutils import nodes
from latex2mathml.converter import convert


def _inline(self: Any, node: nodes.math) -> None:
    self.body.append(convert(node.astext()))
    raise nodes.SkipNode


def _block(self: Any, node: nodes.math_block) -> None:
    self.body.append(convert(node.astext(), display="block"))
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, bool]:
    """Offer ``html_math_renderer = "mathml"``."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
