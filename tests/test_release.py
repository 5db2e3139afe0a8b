"""What a release says of itself says it alike everywhere; `make release-check` tries the rest."""

import re
import tomllib
from pathlib import Path

import pytest

import kha_megatron

ROOT = Path(kha_megatron.__file__).parents[1]
yaml = pytest.importorskip("yaml")


def test_one_version_and_one_date():
    """Of the code, the citations and the newest release in the changelog."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == kha_megatron.__version__
    released = re.search(r"^## (\d\S*) \((\S+)\)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert released, "CHANGELOG.md has no heading `## VERSION (DATE)`"
    assert released.groups() == (cited["version"], str(cited["date-released"]))
    entries = (ROOT / "CITATION.bib").read_text()
    assert re.findall(r"version = \{(.+)\}", entries) == [cited["version"]]
    assert re.findall(r"^  year +=\s+\{(\d+)\}", entries, re.M) == [
        str(cited["references"][0]["year"]),
        str(cited["date-released"])[:4],
    ]


def test_citations_name_the_paper_and_its_authors_alike():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    (paper,) = cited["references"]
    entries = (ROOT / "CITATION.bib").read_text()
    authors = [f"{a['family-names']}, {a['given-names']}" for a in paper["authors"]]
    assert f"{{{' and '.join(authors)}}}" in entries
    assert f"{{{paper['title']}}}" in entries
    assert paper["url"] in entries


def test_the_project_says_what_it_is_tried_with():
    """Pythons that are named are those that installation allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r"Python :: (3\.\d+)", " ".join(project["classifiers"]))
    least = re.search(r">=(3\.\d+)", project["requires-python"])[1]
    assert named[0] == least
    assert cited_license() == project["license"]


def cited_license():
    return yaml.safe_load((ROOT / "CITATION.cff").read_text())["license"]
