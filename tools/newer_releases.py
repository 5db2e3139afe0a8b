"""Print the releases of our dependencies that are newer than pyproject.toml allows.

    python tools/newer_releases.py --names                  print the names of all dependencies
    python tools/newer_releases.py <newest-releases.txt     lines such as torch==2.15.0

`make test-versions` and .ci/run call it.
"""

import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
EXCLUDED = ("kha-megatron", "flash-attn")  # flash-attn has no wheels to read the version from


def direct_requirements() -> dict[str, Requirement]:
    """Return the requirements of the package and of all its extras by name.

    If several of them name a package, the first one counts: extras for developers come last.
    """
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    lines = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        lines += extra
    requirements: dict[str, Requirement] = {}
    for requirement in map(Requirement, lines):
        name = canonicalize_name(requirement.name)
        if name not in EXCLUDED:
            requirements.setdefault(name, requirement)
    return requirements


def main() -> None:
    requirements = direct_requirements()
    if sys.argv[1:] == ["--names"]:
        print(*requirements, sep="\n")
        return
    for line in sys.stdin:
        name, _, latest = line.strip().partition("==")
        requirement = requirements.get(canonicalize_name(name))
        if requirement and latest not in requirement.specifier:
            print(f"newer release: {name} {latest} (allowed: {requirement})")


if __name__ == "__main__":
    main()
