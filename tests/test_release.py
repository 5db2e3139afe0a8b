"""Metadata of a release is consistent. `make release-check` checks the rest."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import kha_megatron

ROOT = Path(kha_megatron.__file__).parents[1]
yaml = pytest.importorskip("yaml")


def read_project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.fast
def test_code_citations_and_changelog_agree():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    version = citation["version"]
    date = str(citation["date-released"])
    assert version == kha_megatron.__version__
    changelog = (ROOT / "CHANGELOG.md").read_text()
    heading = re.search(r"^## (\d\S*) \((\S+)\)$", changelog, re.M)
    assert heading, "CHANGELOG.md has no heading `## VERSION (DATE)`"
    assert heading.groups() == (version, date)
    (paper,) = citation["references"]
    entries = (ROOT / "CITATION.bib").read_text()
    assert re.findall(r"version = \{(.+)\}", entries) == [version]
    years = re.findall(r"^  year +=\s+\{(\d+)\}", entries, re.M)
    assert years == [str(paper["year"]), date[:4]]
    names = [f"{author['family-names']}, {author['given-names']}" for author in paper["authors"]]
    authors = " and ".join(names)
    assert f"{{{authors}}}" in entries
    assert f"{{{paper['title']}}}" in entries
    assert paper["url"] in entries


def test_classifiers_and_licenses_agree():
    project = read_project()
    versions = re.findall(r"Python :: (3\.\d+)", " ".join(project["classifiers"]))
    oldest = re.search(r">=(3\.\d+)", project["requires-python"])[1]
    assert versions[0] == oldest
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["license"] == project["license"]


def describe_bounds(requirement):
    """Describe ``>=2.9,<2.16`` as ``2.9 to 2.15``."""
    bounds = {specifier.operator: specifier.version for specifier in requirement.specifier}
    major, minor = bounds["<"].split(".")
    newest = f"{major}.{int(minor) - 1}"
    return newest if newest == bounds[">="] else f"{bounds['>=']} to {newest}"


def test_documented_versions_are_the_bounds():
    project = read_project()
    extras = project["optional-dependencies"]
    requirements = {}
    for line in (*project["dependencies"], *extras["launch"], *extras["te"]):
        requirement = Requirement(line)
        requirements[requirement.name] = requirement
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
    project = read_project()
    lines = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        lines += extra
    for line in lines:
        requirement = Requirement(line)
        operators = {specifier.operator for specifier in requirement.specifier}
        if requirement.name != "kha-megatron":
            assert operators in ({">=", "<"}, {"=="}), requirement
