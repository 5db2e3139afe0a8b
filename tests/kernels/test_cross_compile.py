"""Every kernel that Hopper would be asked to compile, within its bounds, without a Hopper."""

import sys
from uuid import uuid4

import pytest
import torch

from kha_megatron.ops.kernels import tilings
from kha_megatron.ops.kernels.tilings import DTYPES, HEAD_DIMS
from tools.cross_compile import (
    Launch,
    Report,
    compile_all,
    compile_launch,
    compile_reduction,
    complaints,
    fingerprint,
    launches,
)

pytestmark = pytest.mark.usefixtures("usable_triton")

if sys.platform != "linux":
    pytest.skip("Triton brings ptxas on Linux only", allow_module_level=True)


QUICK = (128, 256)
"""Head dims that ``make test`` compiles: the paper's, and the largest."""


def held_to_their_bounds(reports, dtypes, head_dims=HEAD_DIMS):
    chosen = [launch for launch in launches(dtypes) if launch.head_dim in head_dims]
    found = reports(chosen, compile_all)
    found = {str(launch): complaints(launch, report) for launch, report in found.items()}
    return {name: why for name, why in found.items() if why}


@pytest.mark.timeout(1800)  # 42 compilations, of a second each where nothing else runs
def test_common_launches_fit_hopper(reports):
    assert held_to_their_bounds(reports, (torch.bfloat16,), QUICK) == {}
    assert held_to_their_bounds(reports, (torch.float32,), QUICK[:1]) == {}


@pytest.mark.whole
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_launch_fits_hopper(reports, dtype):
    assert held_to_their_bounds(reports, (dtype,)) == {}


def test_the_reduction_compiles():
    assert compile_reduction().spilled == 0


def test_only_what_has_not_changed_is_not_compiled_again(reports, monkeypatch):
    asked, thing, another = [], f"a thing {uuid4()}", f"another {uuid4()}"

    def once(things):
        asked.append(things)
        return dict.fromkeys(things, Report(1, 2, 3, 4, {}))

    for _ in range(2):
        assert reports([thing], once) == {thing: Report(1, 2, 3, 4, {})}
    assert reports([thing, another], once)[another].spilled == 2
    assert asked == [[thing], [another]]
    before = fingerprint()
    monkeypatch.setattr("triton.__version__", "another")
    assert fingerprint() != before


def test_the_papers_products_are_a_warpgroups_wide(reports):
    """No product of one warp, whose instructions keep Hopper's tensor cores half idle."""
    chosen = [
        launch for launch in launches((torch.bfloat16,)) if launch.head_dim == 128 and launch.tma
    ]
    assert len(chosen) == 9  # 3 kernels, 3 variants
    found = reports(chosen, compile_all)
    assert {str(launch) for launch, r in found.items() if "HMMA" in r.instructions} == set()


def test_covers_what_is_launched():
    # 3 kernels, 3 variants, 5 head dims; through descriptors where columns are not cut
    assert len(launches((torch.bfloat16,))) == 45 + 45 - 2 * 3
    assert len(launches((torch.float32,))) == 45


def test_a_spilling_tiling_is_found(monkeypatch):
    rows = {("mlp", 128): tilings.Tiling(128, 128, 8, 1)}
    monkeypatch.setitem(tilings._TWO_BYTES["sm_90"], "backward_input", rows)
    launch = Launch("backward_input", "mlp", 128, torch.bfloat16, False)
    assert "bytes spilled, bound 0" in complaints(launch, compile_launch(launch))[0]


def test_too_much_shared_memory_is_found():
    launch = Launch("forward", "mlp", 128, torch.bfloat16, True)
    report = Report(200, 0, 227 * 1024, 256, {"HGMMA": 24})
    assert complaints(launch, report) == []
    assert "shared memory" in complaints(launch, report._replace(shared=227 * 1024 + 1))[0]
