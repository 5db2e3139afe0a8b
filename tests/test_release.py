"""Metadata of a release is consistent. `make release-check` checks the rest."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import kha_megatron

ROOT = Path(kha_megatron.__file__).parents[1]
yaml = pytest.importorskip("yaml")


@pytest.mark.fast
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


def describe_bounds(requirement):
    """Describe ``>=2.9,<2.16`` as ``2.9 to 2.15``."""
    bounds = {specifier.operator: specifier.version for specifier in requirement.specifier}
    major, minor = bounds["<"].split(".")
    newest = f"{major}.{int(minor) - 1}"
    return newest if newest == bounds[">="] else f"{bounds['>=']} to {newest}"


def test_documented_versions_are_the_bounds():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *extras["launch"], *extras["te"]]
    requirements = {line.name: line for line in map(Requirement, lines)}
    table = (ROOT / "docs" / "support.md").read_text()
    guide = " ".join((ROOT / "docs" / "start.md").read_text().split())
    for name, title in (
        ("torch", "torch"),
        ("transformers", "transformers"),
        ("nemo-run", "NeMo-Run"),
        ("transformer-engine", "Transformer Engine"),
    ):
        assert f"| {title} | {describe_bounds(requirements[name])}" in table
    for name in ("torch", "transformers"):
        assert f"{name} {describe_bounds(requirements[name])}" in guide


def test_every_dependency_has_an_upper_bound():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        lines += extra
    for requirement in map(Requirement, lines):
        operators = {specifier.operator for specifier in requirement.specifier}
        ours = requirement.name == "kha-megatron"
        assert ours or operators in ({">=", "<"}, {"=="}), requirement
