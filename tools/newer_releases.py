"""Print the releases of our dependencies that are newer than pyproject.toml allows.

    uv pip list --outdated --format json | python tools/newer_releases.py

`make test-versions` and .ci/run call it.
"""

import json
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def direct_requirements() -> dict[str, Requirement]:
    """Return the requirements of the package and of all its extras by name."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    lines = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        lines += extra
    requirements = map(Requirement, lines)
    return {canonicalize_name(requirement.name): requirement for requirement in requirements}


def main() -> None:
    requirements = direct_requirements()
    for package in json.load(sys.stdin):
        requirement = requirements.get(canonicalize_name(package["name"]))
        latest = package["latest_version"]
        if requirement and latest not in requirement.specifier:
            name = package["name"]
            tested = package["version"]
            print(f"newer release: {name} {latest} (tested: {tested}, allowed: {requirement})")


if __name__ == "__main__":
    main()
