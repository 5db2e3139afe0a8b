"""Check mechanisms without importing Megatron for each of them."""

import json

import pytest

from kha_megatron import testing
from tests import entry

LAYOUTS = "from kha_megatron.testing import layouts; layouts.main()"


@pytest.fixture
def forked_check(monkeypatch) -> None:
    """Run the layouts of ``check_mechanism`` in a fork of a process that has imported Megatron."""

    def check_layouts(request):
        run = entry.run([request], program=LAYOUTS)
        assert run.codes == [0], run.output
        return json.loads(run.output.splitlines()[-1])

    monkeypatch.setattr(testing, "_check_layouts", check_layouts)
