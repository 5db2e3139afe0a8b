"""The documentation builds, its links resolve, and its tables match the code."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kha_megatron
from kha_megatron.recipes import RECIPES
from tests.architecture.test_rooms import ARROWS, FREE
from tests.docs.pages import PAGES, ROOT, blocks

PACKAGE = Path(kha_megatron.__file__).parent


def test_table_lists_every_recipe_or_its_family():
    names = {f"table{number}/*" for number in range(1, 6)}  # "table1/* to table5/*"
    for line in (ROOT / "docs/launch.md").read_text().splitlines():
        if line.startswith("|"):
            first_cell = line.split("|")[1]
            names.update(re.findall("`(.*?)`", first_cell))
    for name in RECIPES:
        family = f"{name.partition('/')[0]}/*"
        assert name in names or family in names, name


@pytest.mark.whole  # `make docs` builds it too
def test_documentation_builds_without_warnings(tmp_path):
    pytest.importorskip("sphinx", reason="NOT TESTED: needs the extra docs")
    site = tmp_path / "site"
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going"]
    command += ["-c", "docs", "-d", tmp_path / "trees", ".", site]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert (site / "index.html").is_file()
    reference = (site / "docs/reference.html").read_text()
    for text in ("kha-megatron convert to-hf", "--max-shard-size", "--kha-log-interval"):
        assert text in reference
    assert "<math" in (site / "docs/mechanisms.html").read_text()
    remote = r'<(?:script|img|link)[^>]+(?:src|href)="https?:'
    for page in site.rglob("*.html"):
        assert not re.search(remote, page.read_text()), f"{page} loads a remote file"


@pytest.mark.parametrize("page", PAGES)
def test_links_point_to_files_of_the_repository(page):
    file = ROOT / page
    code_block = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
    text = code_block.sub("", file.read_text())
    for target in re.findall(r"\]\(([^)\s#]+)[^)]*\)", text):
        if not re.match(r"https?:", target):
            assert (file.parent / target).exists(), f"{page} links to {target}"


def literals(folder):
    """Return every string literal of a package, with ``…`` for the values of f-strings."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield " ".join(node.value.split())
            elif isinstance(node, ast.JoinedStr):
                text = ""
                for part in node.values:
                    text += str(part.value) if isinstance(part, ast.Constant) else "…"
                yield " ".join(text.split())


def test_quoted_errors_exist_in_the_code():
    bootstrap = (ROOT / "tools/bootstrap.sh").read_text()
    known = [*literals(PACKAGE), " ".join(bootstrap.split())]
    quoted = []
    for _, block in blocks("docs/troubleshooting.md", "none"):
        quoted += [line.removeprefix("error: ") for line in block.splitlines()]
    assert len(quoted) > 8
    lost = [line for line in quoted if not any(line in text for text in known)]
    assert not lost


def rows(page, heading):
    """Yield the cells of each row of the table under a heading."""
    _, _, after_heading = (ROOT / page).read_text().partition(f"## {heading}\n")
    section, _, _ = after_heading.partition("\n## ")
    table = [line for line in section.splitlines() if line.startswith("|")]
    for line in table[2:]:
        yield [cell.strip() for cell in line.strip("|").split("|")]


def test_table_of_rooms_matches_the_import_test():
    documented = {}
    for room, _, imports, *_ in rows("docs/design.md", "Package structure"):
        documented[room.strip("`")] = set(re.findall(r"`(\w+)`", imports))
    assert documented == {room: ARROWS[room] for room in FREE}


def test_homes_of_facts_exist():
    for fact, home in rows("docs/design.md", "Where to make changes"):
        for path in re.findall(r"`([\w./]+)`", home):
            assert (ROOT / path).exists() or path == "HeadTensor", f"{fact}: {path}"
