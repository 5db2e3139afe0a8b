"""Compare the losses of short trainings in bf16 and FP8 (``make gpu-check``).

Several run at a time, in the order of ``cases.py``. Those that do not start within
``KHA_GPU_SECONDS`` are skipped.
"""

import json
import math
import os
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gpu
import pytest

from kha_megatron.model.run import render
from kha_megatron.recipes import prepare_job
from kha_megatron.recipes.log_lines import read_history
from tests.gpu import cases
from tests.gpu.cases import CASES, STEPS, Case, distance, end, faults
from tests.ports import free_port

BY_NAME = {case.name: case for case in CASES}
JOBS = max(1, min(4, (os.cpu_count() or 1) // 4))
LEAST_SECONDS = 25
"""A training is not started with less time: imports alone take most of it."""
CASE_SECONDS = 150
"""Time limit of one training."""
STARTED = time.monotonic()


@pytest.fixture(scope="module")
def has() -> dict[str, bool]:
    """Return which of ``cases.NEEDS`` this machine has."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("NOT TESTED: needs a CUDA device, and none was found")
    needs = {name: bool(version) for name, version in gpu.find_components().items()}
    if needs["te"]:
        import transformer_engine.pytorch as te

        needs["fp8"], _ = te.is_fp8_available(return_reason=True)
        needs["blockwise"], _ = te.is_fp8_block_scaling_available(return_reason=True)
        needs["mxfp8"], _ = te.is_mxfp8_available(return_reason=True)
    return needs


def train(case, folder, *, data, device="cuda", seconds=CASE_SECONDS) -> list[float]:
    """Train a case in one process and return the loss of each step."""
    log = folder / f"{case.name}.log"
    words = {"--tensorboard-dir": (str(folder / case.name),)}
    # simultaneous runs would write the same index file
    words |= {"--data-cache-path": (str(folder / case.name / "cache"),)}
    if device == "cpu":
        words |= cases.TINY
        words |= {
            "--mock-data": (),
            "--vocab-size": ("128",),
            "--num-workers": ("0",),
        }
    job = prepare_job(
        case.recipe,
        data=data,
        overrides=render(words),
        device=device,
        ranks=1,
    )
    rank = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    with log.open("wb") as output:
        done = subprocess.run(
            job.command,
            env=os.environ | job.environment | rank,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=seconds,
            check=False,
        )
    if done.returncode:
        last_lines = log.read_text(errors="replace").splitlines()[-20:]
        message = [f"{case.name} ended with {done.returncode}", *last_lines]
        raise RuntimeError("\n".join(message))
    history = read_history(folder / case.name)["lm loss"]
    return [loss for _, loss in history]


def train_until(end: float, case: Case, folder: Path, data: Path) -> list[float] | None:
    """Train until ``end``; return None if no time was left."""
    left = end - time.monotonic()
    if left < LEAST_SECONDS:
        return None
    try:
        return train(case, folder, data=data, seconds=min(left, CASE_SECONDS))
    except subprocess.TimeoutExpired:
        if left >= CASE_SECONDS:
            raise
    return None


@pytest.fixture(scope="module")
def trainings(request, has, tmp_path_factory):
    """Return the losses of every selected case that can run here, as futures."""
    until = STARTED + float(os.environ.get("KHA_GPU_SECONDS", "inf"))
    folder = tmp_path_factory.mktemp("losses")
    data = folder / "data"
    words = ["data", "prepare", "--vocab-size", "4096", "--out", str(data)]
    subprocess.run([sys.executable, "-m", "kha_megatron", *words], check=True)
    with ThreadPoolExecutor(JOBS) as pool:
        futures = {}
        for case in selected_cases(request):
            if not cases.missing(case, has):
                futures[case.name] = pool.submit(train_until, until, case, folder, data)
        yield futures
        pool.shutdown(cancel_futures=True)


def selected_cases(request):
    """Return the cases of this module's tests that were selected."""
    selected = []
    for item in request.session.items:
        callspec = getattr(item, "callspec", None)
        if item.fspath == request.fspath and callspec and "case" in callspec.params:
            selected.append(callspec.params["case"])
    return selected


@pytest.mark.gpu
@pytest.mark.timeout(0)  # what it waits for has limits of its own
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_losses_follow(case, trainings, has, record_property):
    reason = cases.missing(case, has)
    if reason:
        pytest.skip(f"NOT TESTED: {reason}")
    losses = trainings[case.name].result()
    if losses is None:
        pytest.skip("NOT REACHED: no time was left for it")
    followed = trainings.get(case.like or "")
    reference = None
    if followed is not None and not followed.exception():
        reference = followed.result()
    wrong = faults(case, losses, reference, STEPS)
    record_property("losses", json.dumps(losses))
    words = f"loss {losses[0]:.4f} at first, {end(losses):.4f} at the end"
    if reference:
        first, last = distance(losses, reference)
        words += f"; {first:.4f} and {last:.4f} from {case.like}"
        words += f" (bounds {case.bound.first or '-'} and {case.bound.end})"
    elif case.like:
        words += f"; not compared: {case.like} did not finish"
    record_property("detail", words)
    assert not wrong


def refused(names):
    """Return by case why Megatron refuses its command line; empty if it does not.

    Without Transformer Engine its cases are only parsed and checked.
    """
    warnings.simplefilter("ignore")
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.training.argument_utils import core_transformer_config_from_args
    from megatron.training.arguments import parse_args, validate_args

    from kha_megatron.training.arguments import add_kha_arguments, check_args, kha_from_args

    data = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "4096"]
    reasons = {}
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            case = BY_NAME[name]
            run = case.recipe.run_for(data)
            patch.setattr(sys, "argv", ["training", *run.words()])
            try:
                args = parse_args(add_kha_arguments)
                check_args(args)
                kha_from_args(args)
                if HAVE_TE or "te" not in case.needs:
                    validate_args(args, {})
                    core_transformer_config_from_args(args)
                reasons[case.name] = ""
            except (Exception, SystemExit) as error:  # argparse exits
                reasons[case.name] = f"{type(error).__name__}: {error}"
    return reasons


def test_megatron_accepts_the_arguments_of_every_case(ranks):
    (reasons,) = ranks(refused, 1, list(BY_NAME))
    assert reasons == dict.fromkeys(BY_NAME, "")


def test_megatron_validates_the_arguments_of_cuda_graphs(ranks_with_engine):
    names = [name for name in BY_NAME if name.endswith("graphs")]
    assert len(names) == 4
    (reasons,) = ranks_with_engine(refused, 1, names)
    assert reasons == dict.fromkeys(names, "")


@pytest.mark.whole
def test_a_case_trains_on_the_cpu(tmp_path):
    case = BY_NAME["dense-local"]
    steps = int(cases.TINY["--train-iters"][0])
    losses = train(case, tmp_path, data=None, device="cpu")
    assert faults(case, losses, None, steps) == []


def curve(end, first=8.3):
    """Return losses that fall for 100 steps and stay at ``end`` then."""
    return [first + (end - first) * min(1.0, i / 100) for i in range(STEPS)]


def test_bounds_detect_wrong_losses():
    alone = BY_NAME["dense-bf16"]
    case = BY_NAME["dense-fp8-tensorwise"]
    good = curve(4.0)
    bound = case.bound.end
    assert faults(case, curve(4.0 + 0.9 * bound), good, STEPS) == []
    for losses, other, reference, message in (
        (curve(4.0 + 1.1 * bound), case, good, "last losses"),
        (curve(4.0, first=8.5), case, good, "first loss"),
        (curve(8.2), alone, None, "it did not learn"),
        (good[:-1], alone, None, f"{STEPS - 1} losses of {STEPS}"),
        ([*good[:7], math.nan, *good[8:]], alone, None, "the loss is not finite at step 8"),
    ):
        assert faults(other, losses, reference, STEPS)[0].startswith(message)


def test_references_come_before_their_cases():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    for case in CASES:
        if case.like:
            assert names.index(case.like) < names.index(case.name)
            assert BY_NAME[case.like].moe == case.moe
