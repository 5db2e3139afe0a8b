"""``{commands}`` and ``{arguments}``: the command line, and what the entry point takes, as it is.

Both ask what the user calls: the typer app and the argparse parser.
"""

import argparse
import re
from collections.abc import Iterator
from textwrap import dedent
from typing import Any

from docutils import nodes
from sphinx.util.docutils import SphinxDirective
from typer.main import get_command

from kha_megatron.cli import app as commands
from kha_megatron.training.arguments import add_kha_arguments

VERBATIM = "\b"
"""What a paragraph begins with, in the help of a command, whose line breaks are to stay."""


def escaped(text: str) -> str:
    """Plain text as Markdown; what stands between backticks stays."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([\\*_<>\[\]$|~#])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)


def paragraphs(help_text: str) -> Iterator[str]:
    """The help of a command as Markdown."""
    for paragraph in re.split(r"\n\s*\n", help_text.strip()):
        if not paragraph.startswith(VERBATIM):
            yield escaped(paragraph)
            continue
        yield verbatim(paragraph.removeprefix(VERBATIM))


def verbatim(text: str) -> str:
    """A block of lines as they are."""
    return f"```text\n{dedent(text.strip(chr(10)))}\n```"


def entries(pairs: Iterator[tuple[str, str]]) -> Iterator[str]:
    """Names and their meaning as a definition list."""
    for names, meaning in pairs:
        yield f"`{names}`\n: {escaped(' '.join(meaning.split())) or '.'}\n"


def command(path: str, one: Any) -> Iterator[str]:
    """A command, and those of a group under it, as Markdown."""
    children = getattr(one, "commands", None)
    if path != "kha-megatron":
        yield f"{'##' if path.count(' ') == 1 else '###'} {path}"
        yield from paragraphs(one.help or "")
    if children:
        for name, child in children.items():
            yield from command(f"{path} {name}", child)
        return
    context = one.make_context(path, [], resilient_parsing=True)
    shown = [param.get_help_record(context) for param in one.params]
    usage = " ".join(one.collect_usage_pieces(context))
    yield verbatim(f"{path} {usage}")
    yield from entries(record for record in shown if record and "--help" not in record[0])
    if one.examples:
        yield f"Examples:\n\n{verbatim(one.examples)}"


class Commands(SphinxDirective):
    """Every command with its help, its example and its options."""

    def run(self) -> list[nodes.Node]:
        """Its sections."""
        text = "\n\n".join(command("kha-megatron", get_command(commands)))
        return self.parse_text_to_nodes(text, allow_section_headings=True)


class Arguments(SphinxDirective):
    """What ``kha_megatron.training`` takes beside Megatron's own arguments."""

    def run(self) -> list[nodes.Node]:
        """A definition list."""
        parser = add_kha_arguments(argparse.ArgumentParser(add_help=False))
        pairs = []
        for action in parser._actions:
            choices = f" {{{','.join(map(str, action.choices))}}}" if action.choices else ""
            takes = choices or ("" if action.nargs == 0 else f" {action.metavar or 'VALUE'}")
            default = (
                "" if action.default in (None, False, True) else f" Default: {action.default}."
            )
            pairs.append((action.option_strings[0] + takes, (action.help or "") + default))
        return self.parse_text_to_nodes("\n".join(entries(iter(pairs))))


def setup(app: Any) -> dict[str, bool]:
    """Register both directives."""
    app.add_directive("commands", Commands)
    app.add_directive("arguments", Arguments)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
