"""Metadata of a release is consistent. `make release-check` checks the rest."""

import re
import tomllib
from pathlib import Path

import pytest

import kha_megatron

ROOT = Path(kha_megatron.__file__).parents[1]
yaml = pytest.importorskip("yaml")


def test_code_citations_and_changelog_agree():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == kha_megatron.__version__
    released = re.search(r"^## (\d\S*) \((\S+)\)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert released, "CHANGELOG.md has no heading `## VERSION (DATE)`"
    assert released.groups() == (cited["version"], str(cited["date-released"]))
    (paper,) = cited["references"]
    entries = (ROOT / "CITATION.bib").read_text()
    assert re.findall(r"version = \{(.+)\}", entries) == [cited["version"]]
    assert re.findall(r"^  year +=\s+\{(\d+)\}", entries, re.M) == [
        str(paper["year"]),
        str(cited["date-released"])[:4],
    ]
    authors = [f"{a['family-names']}, {a['given-names']}" for a in paper["authors"]]
    assert f"{{{' and '.join(authors)}}}" in entries
    assert f"{{{paper['title']}}}" in entries
    assert paper["url"] in entries


def test_classifiers_and_licenses_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions = re.findall(r"Python :: (3\.\d+)", " ".join(project["classifiers"]))
    assert versions[0] == re.search(r">=(3\.\d+)", project["requires-python"])[1]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["license"] == project["license"]
