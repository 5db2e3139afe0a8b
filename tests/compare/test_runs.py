"""Planning, refusing, starting and resuming the runs of a comparison."""

import json
import math

import pytest

from kha_megatron.checkpoint.ownership import owned
from kha_megatron.checkpoint.staging import write_json
from kha_megatron.compare import trials
from kha_megatron.compare.statistics import average_bins, compute_final_loss
from kha_megatron.compare.trials import RUN, plan_comparison, start_trial
from kha_megatron.compare.variants import parse_variants
from kha_megatron.errors import ConfigError, DataError, OutputError
from kha_megatron.model.run import parse
from kha_megatron.recipes import get_recipe
from tests.checkpoint.saved import save
from tests.recipes.conftest import data  # noqa: F401

MOCK = ["--mock-data", "--train-iters", "40"]


def planned(output, overrides=MOCK, variants="baseline,random-init", seeds=2, **settings):
    return plan_comparison(
        get_recipe("quickstart"),
        parse_variants(variants),
        seeds,
        output=output,
        overrides=overrides,
        **settings,
    )


def flags_of(comparison):
    return [trial.config.flags for trial in comparison.trials]


def arguments(job):
    start = job.command.index("-m") + 2
    return parse(job.command[start:])


def starts(trial):
    """Return how often a trial was started, as its directory says."""
    return json.loads((trial.folder / RUN).read_text())["starts"]


@pytest.mark.fast
def test_runs_of_one_seed_differ_only_in_their_kha_settings(tmp_path):
    comparison = planned(tmp_path / "out")
    names = ["baseline-seed1", "random-init-seed1", "baseline-seed2", "random-init-seed2"]
    assert [trial.name for trial in comparison.trials] == names
    baseline, random_init, second_seed, _ = flags_of(comparison)
    assert differing(baseline, random_init) == {"--kha-value", "--kha-init"}
    assert differing(baseline, second_seed) == {"--seed", "--kha-init-seed"}
    assert baseline["--save-interval"] == ("10",)
    assert not (tmp_path / "out").exists()


def differing(flags, other_flags):
    """Return the flags that only one run has, or that differ."""
    names = flags.keys() | other_flags.keys()
    return {name for name in names if flags.get(name) != other_flags.get(name)}


def test_null_runs_perturb_the_reference_by_rounding(tmp_path):
    comparison = planned(tmp_path, variants="kha_mlp,baseline", seeds=1, null=True)
    assert [trial.variant.name for trial in comparison.trials] == ["kha_mlp", "null", "baseline"]
    reference, null, _ = flags_of(comparison)
    assert null == reference | {"--kha-perturb-embedding": ("1e-06",)}
    comparison = planned(tmp_path, [*MOCK, "--bf16"], seeds=1, null=True)
    null = flags_of(comparison)[1]
    assert null["--kha-perturb-embedding"] == ("0.00390625",)


def test_held_out_evaluates_whole_batches_once(tmp_path):
    flags = flags_of(planned(tmp_path, held_out_sequences=17))[0]
    assert flags["--eval-iters"] == ("2",)  # of 16 sequences each
    assert flags["--eval-interval"] == ("41",)  # after the last iteration only


@pytest.mark.parametrize(
    ("words", "settings", "match"),
    [
        ("--save=x", {}, "--save is set by --output and --seeds"),
        ("--kha-init random", {}, "--kha-init is set by --variants"),
        ("--eval-iters 3", {"held_out_sequences": 1}, "--eval-iters is set by --held-out"),
        (
            "--decrease-batch-size-if-needed",
            {"held_out_sequences": 1},
            "--held-out requires `-- --global-batch-size N`",
        ),
    ],
)
def test_bad_input_is_refused(words, settings, match, tmp_path):
    with pytest.raises(ConfigError, match=match):
        planned(tmp_path / "out", [*MOCK, *words.split()], **settings)
    assert list(tmp_path.iterdir()) == []


def test_variants_keep_the_kind_of_attention(tmp_path):
    words = [*MOCK, "--kha-attention", "gta", "--rotary-percent", "0.5"]
    attention = [flags["--kha-attention"] for flags in flags_of(planned(tmp_path, words))]
    assert attention == [("gta",)] * 4


def test_a_foreign_directory_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("ten years of work")
    with pytest.raises(OutputError, match="was not written by `kha-megatron compare`"):
        planned(tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "ten years of work"


def test_a_run_without_a_checkpoint_begins_anew(tmp_path):
    (trial, *_) = planned(tmp_path / "out").trials
    job = start_trial(trial)
    assert not job.resume
    assert "--load" not in arguments(job)
    assert starts(trial) == 1
    (trial.folder / "half-written").write_text("")
    assert not start_trial(trial).resume
    assert [file.name for file in trial.folder.iterdir()] == [RUN]


def test_parallel_runs_have_their_own_sample_index(tmp_path):
    parallel = planned(tmp_path / "out").trials
    save(parallel[0].folder / "checkpoints", 20, {}, kha_value=None)
    index = parallel[0].folder / "index"
    index.mkdir()
    (index / "half-written").touch()
    for trial in parallel:
        job = start_trial(trial)
        assert arguments(job)["--data-cache-path"] == (str(trial.folder / "index"),)
    assert not index.exists()


@pytest.fixture
def interrupted(tmp_path):
    """Return a trial with a checkpoint of iteration 20."""
    (trial, *_) = planned(tmp_path / "out").trials
    save(trial.folder / "checkpoints", 20, {}, kha_value=None)
    write_json(trial.folder / RUN, {"starts": 1, "arguments": trial.config.flags})
    return trial


@pytest.mark.fast
def test_an_interrupted_run_resumes(interrupted):
    job = start_trial(interrupted)
    assert job.resume
    assert job.stopped_at == 20
    assert arguments(job)["--load"] == arguments(job)["--save"]
    assert starts(interrupted) == 2


def test_lost_losses_stay_missing(tmp_path):
    (trial, *_) = planned(tmp_path).trials
    history = [(2, 2.0), (3, 3.0), (39, 39.0)]
    losses = trials._read_losses({"lm loss": history}, trial)
    assert losses == [None, 2.0, 3.0, *[None] * 35, 39.0, None]
    assert compute_final_loss(losses) == 39.0
    assert average_bins(losses, 20)[:3] == [(1.5, 2.0), (3.5, 3.0), (5.5, None)]
    without_last = [(i, 2.0) for i in range(1, 39)]
    with pytest.raises(DataError, match=r"final losses of .* are missing"):
        trials._read_losses({"lm loss": without_last}, trial)
    not_finite = [(39, 2.0), (40, math.nan)]
    with pytest.raises(DataError, match="not finite at iteration 40"):
        trials._read_losses({"lm loss": not_finite}, trial)


def test_a_missing_held_out_loss_is_an_error(tmp_path):
    trial = planned(tmp_path, held_out_sequences=16).trials[0]

    def read(step, loss):
        return trials._read_held_out_loss({"lm loss validation": [(step, loss)]}, trial)

    assert read(40, 2.5) == 2.5
    with pytest.raises(DataError, match=r"Held-out loss of .*baseline-seed1 is None"):
        read(39, 2.5)
    with pytest.raises(DataError, match="is nan"):
        read(40, math.nan)
    without_held_out = planned(tmp_path).trials[0]
    assert trials._read_held_out_loss({}, without_held_out) is None


def test_changed_arguments_of_a_started_run_are_refused(interrupted):
    output = interrupted.folder.parents[1]
    planned(output)
    planned(output, seeds=4, variants="baseline,kha_linear,random-init")  # only more
    with pytest.raises(OutputError, match=r"started with other arguments \(--lr: 0.002, now 1\)"):
        planned(output, [*MOCK, "--lr", "1"])


def test_changed_data_of_a_started_run_is_refused(tmp_path, data):  # noqa: F811
    output = tmp_path / "out"

    def plan():
        return planned(output, ["--train-iters", "40", "--split", "4,1,0"], data=data).trials

    (trial, *_) = plan()
    start_trial(trial)
    record = trial.folder / RUN
    assert json.loads(record.read_text())["data_files"].keys() == {
        str(data / "corpus.bin"),
        str(data / "corpus.idx"),
        str(data / "tokenizer" / "tokenizer.json"),
    }
    plan()
    for name in ("corpus.bin", "corpus.idx", "tokenizer/tokenizer.json"):
        file = data / name
        original = file.read_bytes()
        if file.suffix == ".bin":
            file.write_bytes(original + b"x")
        else:  # a file of the same size
            file.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
        with pytest.raises(
            OutputError, match=rf"with other data \(.*{name} has changed\)\. Please"
        ):
            plan()
        file.write_bytes(original)
    (data / "corpus.bin").unlink()
    with pytest.raises(OutputError, match=r"corpus\.bin has changed"):
        plan()
    content = json.loads(record.read_text())
    del content["data_files"]  # as in earlier versions
    write_json(record, content)
    plan()


def test_a_run_that_still_trains_is_not_started_again(interrupted):
    with owned(interrupted.folder / "checkpoints"), pytest.raises(OutputError, match="is in use"):
        start_trial(interrupted)
