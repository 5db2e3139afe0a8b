"""Pytest plugin of ``tools/gpu.py run``: publish the outcome of each test when it ends.

Tests that passed in an earlier run are deselected.
"""

import os
from pathlib import Path

import measuring
import pytest

NOT_REACHED = "NOT REACHED"
"""Beginning of the reason of a skip for want of time."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    passed = set()
    stage = os.environ.get(measuring.STAGE_VARIABLE)
    for row in measuring.read_rows(Path(os.environ.get(measuring.ROWS_VARIABLE, ""))):
        if row["stage"] == stage and row["status"] == "passed":
            passed.add(row["name"])
    selected = []
    deselected = []
    for item in items:
        (deselected if item.nodeid in passed else selected).append(item)
    config.hook.pytest_deselected(items=deselected)
    items[:] = selected


def pytest_runtest_logreport(report):
    if "PYTEST_XDIST_WORKER" in os.environ:  # the main process receives the report as well
        return
    if report.when != "call" and report.passed:
        return
    properties = dict(report.user_properties)
    status = report.outcome
    detail = str(properties.get("detail", ""))
    if report.failed:
        detail = detail or last_line(report.longreprtext)
    elif report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        detail = reason.removeprefix("Skipped: ")
        if detail.startswith(NOT_REACHED):
            status = "not reached"
    measuring.publish(report.nodeid, status, detail, seconds=round(report.duration, 2))


def last_line(text):
    """Return the line of a traceback that names the error."""
    errors = [line for line in text.splitlines() if line.startswith("E ")]
    lines = errors or text.splitlines() or [""]
    return lines[0].removeprefix("E ").strip()
