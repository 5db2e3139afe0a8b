"""The documentation pages, and the commands and programs in them."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

PAGES = tuple(
    sorted(
        page.relative_to(ROOT).as_posix()
        for pattern in ("*.md", "docs/**/*.md", "benchmarks/*.md", "patches/*.md", "examples/*.md")
        for page in ROOT.glob(pattern)
        if page.name != "CHANGELOG.md"
    )
)


def blocks(page: str, language: str) -> Iterator[tuple[int, str]]:
    """Yield the number of the first line, from 1, and the text of each block of one language."""
    text = (ROOT / page).read_text()
    for found in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield text.count("\n", 0, found.start(1)) + 1, found[1]


@dataclass(frozen=True)
class Command:
    """One command of a block."""

    place: str
    """``docs/start.md:12``."""
    variables: dict[str, str]
    """Variables that the command sets."""
    words: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join(self.words)


def commands(page: str) -> Iterator[Command]:
    """Return the commands of a page's ``bash`` blocks."""
    for number, block in blocks(page, "bash"):
        for text in re.split(r"(?<!\\)\n", block):
            computed = re.fullmatch(r"\s*(\w+)=(\$\(.*\))", text)  # by the shell
            words = [] if computed else shlex.split(text.replace("\\\n", " "), comments=True)
            variables = {computed[1]: computed[2]} if computed else {}
            while words and (found := re.fullmatch(r"(\w+)=(.*)", words[0], re.DOTALL)):
                variables[found[1]] = found[2]
                words.pop(0)
            if words or variables:
                yield Command(f"{page}:{number}", variables, tuple(words))
            number += text.count("\n") + 1
