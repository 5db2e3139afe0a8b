"""Sphinx's configuration. The source folder is the repository, so that a link works in both.

``make docs`` builds ``build/docs``; nothing is fetched, neither by the build nor by the pages.
"""

import sys
from pathlib import Path

import kha_megatron
import kha_megatron.mcore  # before Megatron, which takes half a Transformer Engine

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "kha_megatron"
copyright = "the authors of kha_megatron, Apache-2.0"
version = release = kha_megatron.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "command_line",
    "mathml",
]
root_doc = "docs/index"
include_patterns = [
    "docs/**.md",
    "docs/**/*.md",
    "benchmarks/*.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
]
exclude_patterns = [".*", "build", "kha_megatron", "tests", "tools", "quickstart", "runs", "data"]

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]  # tables between markers are written by tests

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
nitpicky = True
# what other libraries define, and what of ours is no part of the public names
nitpick_ignore_regex = [("py:.*", r"(?!kha_megatron\.KHA).*")]

smartquotes = False  # two dashes are two dashes

html_theme = "furo"
html_title = "kha_megatron"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_extra_path = ["_root"]  # index.html, which leads from the folder's top to docs/index.html
html_copy_source = False
html_show_sourcelink = False
html_math_renderer = "mathml"
copybutton_prompt_text = "$ "


def _keep_colons(app, what, name, obj, options, lines):
    """Napoleon takes what stands before a colon in an attribute's first line for its type."""
    if what in ("attribute", "data"):
        lines.insert(0, "")


def setup(app):
    """Be asked before napoleon is."""
    app.connect("autodoc-process-docstring", _keep_colons, priority=400)
