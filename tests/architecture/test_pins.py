"""Pins that are older than the newest release say what holds them back, and it does."""

import re
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

LINES = Path(__file__).parents[2].joinpath("constraints.txt").read_text().splitlines()
PINS = dict(re.findall(r"^([\w-]+)==(\S+)", "\n".join(LINES), re.MULTILINE))
HELD = [
    match.groups()
    for line in LINES
    if (match := re.fullmatch(r"([\w-]+)==\S+ +# ([\w-]+) (\S+) wants (\S+)", line))
]


@pytest.mark.parametrize(("name", "holder", "release", "limit"), HELD)
def test_what_holds_a_pin_back_says_so_itself(name, holder, release, limit):
    assert PINS[holder] == release, "look whether the newer one still holds it back"
    try:
        assert version(holder) == release
    except PackageNotFoundError:
        pytest.skip(f"NOT TESTED: {holder} is not installed")
    wanted = [r for r in map(Requirement, requires(holder) or ()) if r.name.lower() == name]
    assert any(limit in str(r.specifier).split(",") for r in wanted), wanted


def test_urllib3_is_held_back_by_a_package_that_is_needed():
    assert "urllib3" in {name for name, *_ in HELD}
