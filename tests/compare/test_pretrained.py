"""Comparisons that start from a pretrained model."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from typer.testing import CliRunner

from kha_megatron import recipes
from kha_megatron.checkpoint.staging import write_json
from kha_megatron.cli import app
from kha_megatron.compare.pretrained import make_recipe
from kha_megatron.compare.trials import RUN, plan_comparison, start_trial
from kha_megatron.compare.variants import parse_variants
from kha_megatron.conversion.to_hf import plan_export
from kha_megatron.data import prepare
from kha_megatron.errors import CheckpointError, ConfigError, DataError, KHAError, OutputError
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.recipes import LaunchResult, get_recipe
from tests.checkpoint.saved import save
from tests.compare.test_runs import differing
from tests.conversion.models import SIZES, make
from tests.training.conftest import corpus, start  # noqa: F401

ITERATIONS = 4
SMALL = f"--train-iters {ITERATIONS} --seq-length 20 --global-batch-size 2 --lr 1e-2".split()
VARIANTS = "baseline,kha_linear,mixed=--kha-value mlp --heads gate.output=element"


@pytest.fixture
def data(corpus):  # noqa: F811
    return Path(corpus[corpus.index("--data-path") + 1]).parent


@pytest.fixture
def pretrained(data, tmp_path):
    """Return a Llama with a tokenizer. Its vocabulary needs padding and its loss is high."""
    tokenizer = AutoTokenizer.from_pretrained(data / "tokenizer")
    config = LlamaConfig(**SIZES | {"vocab_size": len(tokenizer), "tie_word_embeddings": True})
    model = make(config)
    model.lm_head.weight.data.mul_(3)
    model.save_pretrained(tmp_path / "llama")
    tokenizer.save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def planned(pretrained, output, *, recipe=None, variants=VARIANTS, overrides=SMALL, **settings):
    return plan_comparison(
        make_recipe(pretrained, recipe),
        parse_variants(variants),
        1,
        output=output,
        overrides=overrides,
        pretrained=pretrained,
        device="cpu",
        **settings,
    )


def losses_of(output, name):
    result = json.loads((output / f"runs/{name}-seed1/result.json").read_text())
    return result["losses"]


@pytest.fixture
def run_in_process(monkeypatch):
    """Run the jobs of the command in processes that have imported Megatron already."""

    def launch(job, *, on_step, stop):
        words = job.command[job.command.index("-m") + 2 :]
        ended = start(words)
        assert ended.codes == [0], ended.output[-4000:]
        return LaunchResult(
            status="succeeded",
            seconds=1.0,
            last_step=None,
            failure=None,
            log=Path(),
            rank_logs=Path(),
        )

    monkeypatch.setattr(recipes, "launch_job", launch)


@pytest.mark.fast
def test_all_variants_start_with_the_loss_of_the_model(run_in_process, pretrained, data, tmp_path):
    output = tmp_path / "out"
    words = ["compare", "--pretrained-checkpoint", str(pretrained), "--data", str(data)]
    words += ["--variants", VARIANTS, "--null", "--held-out", "6", "--seeds", "1"]
    words += ["--device", "cpu", "--jobs", "1", "--output", str(output), "--json", "--", *SMALL]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    report = json.loads((output / "report.json").read_text())
    runs = {entry["variant"]: entry for entry in report["runs"]}
    assert list(runs) == ["baseline", "null", "kha_linear", "mixed"]
    first = runs["baseline"]["first_loss"]
    assert first > 7  # that of initial weights is log(300) = 5.7
    assert runs["kha_linear"]["first_loss"] == runs["mixed"]["first_loss"] == first
    # the embedding of the null run was perturbed after the weights were loaded
    assert runs["null"]["first_loss"] == pytest.approx(first, abs=1e-4)
    assert losses_of(output, "null") != losses_of(output, "baseline")
    for name in ("kha_linear", "mixed"):
        assert abs(runs[name]["delta"]) > 1e-4
        assert runs[name]["held_out"] < first - 0.1
    assert report["recipe"] == "llama"
    costs = {entry["name"]: entry["cost"] for entry in report["variants"]}
    parameters = AutoModelForCausalLM.from_pretrained(pretrained).num_parameters()
    padding = costs["baseline"]["total"] - parameters
    assert 0 <= padding < 128 * SIZES["hidden_size"]
    layers = SIZES["num_hidden_layers"]
    matrices = layers * 3 * SIZES["head_dim"] ** 2
    gates = layers * SIZES["hidden_size"] * SIZES["num_attention_heads"] * SIZES["head_dim"]
    assert costs["kha_linear"]["kha"] == matrices
    assert costs["mixed"]["kha"] == matrices + gates
    starts = {path.name for path in (output / "starts").iterdir()}
    assert starts == {"baseline", "kha_linear", "mixed"}


def test_a_recipe_gives_the_batch_and_the_model_its_sizes(pretrained, tmp_path):
    comparison = planned(
        pretrained,
        tmp_path / "out",
        recipe=get_recipe("laptop/moe"),
        overrides=["--mock-data"],
    )
    baseline, linear, _ = (trial.config for trial in comparison.trials)
    assert baseline.batch.global_batch_size == 8
    assert baseline.training.lr == 4e-3
    assert "--num-layers" not in baseline.flags
    assert "--num-experts" not in baseline.flags
    assert baseline.flags["--norm-epsilon"] == ("3e-05",)
    assert differing(baseline.flags, linear.flags) == {
        "--pretrained-checkpoint",
        "--kha-query",
        "--kha-key",
        "--kha-value",
    }
    assert not (tmp_path / "out").exists()


def test_an_interrupted_run_resumes_from_its_own_checkpoint(pretrained, tmp_path):
    output = tmp_path / "out"
    trial = planned(pretrained, output, overrides=[*SMALL, "--mock-data"]).trials[1]
    save(trial.folder / "checkpoints", 2, {}, kha_value=None)
    write_json(trial.folder / RUN, {"starts": 1, "arguments": trial.config.flags})
    job = start_trial(trial)
    assert job.resume
    assert "--load" in job.command
    assert not (output / "starts").exists()


def test_a_start_of_another_model_is_refused(pretrained, tmp_path):
    mock = [*SMALL, "--mock-data"]
    trial = planned(pretrained, tmp_path / "out", overrides=mock).trials[0]
    start_trial(trial)
    planned(pretrained, tmp_path / "out", overrides=mock)
    config = json.loads((pretrained / "config.json").read_text())
    config["rms_norm_eps"] = 1e-3
    (pretrained / "config.json").write_text(json.dumps(config))
    with pytest.raises(OutputError, match=r"starts/baseline was made from .*/llama, which is not"):
        planned(pretrained, tmp_path / "out", overrides=mock)


def test_the_tokenizer_of_other_data_is_refused(pretrained, data, tmp_path):
    prepare([Path(json.__file__).parent], tmp_path / "other", vocab_size=280, globs=["*.py"])
    planned(pretrained, tmp_path / "out", data=data)
    with pytest.raises(DataError, match=r"was trained with the tokenizer in .*/llama"):
        planned(pretrained, tmp_path / "out", data=tmp_path / "other")


@pytest.mark.parametrize(
    ("variants", "overrides", "error", "match"),
    [
        ("baseline,random-init", "", CheckpointError, "Variant random-init cannot start from"),
        ("baseline,kha_mlp", "--finetune", ConfigError, "--finetune is set by compare --pretrain"),
        ("baseline,kha_mlp", "--kha-upcycle", ConfigError, "--kha-upcycle is set by compare"),
    ],
)
def test_what_cannot_be_upcycled_is_refused(
    variants, overrides, error, match, pretrained, tmp_path
):
    words = [*SMALL, "--mock-data", *overrides.split()]
    with pytest.raises(error, match=match) as caught:
        planned(pretrained, tmp_path / "out", variants=variants, overrides=words)
    assert "\n" not in str(caught.value)


def test_models_with_kha_are_refused(pretrained, tmp_path):
    plan = plan_export(pretrained, upcycle=HeadsConfig.from_preset("kha_mlp"))
    plan.write(tmp_path / "kha")
    with pytest.raises(CheckpointError, match=r"already uses value=mlp.* a model without KHA"):
        planned(tmp_path / "kha", tmp_path / "out", overrides=[*SMALL, "--mock-data"])
    with pytest.raises(KHAError, match="nothing"):
        planned(tmp_path / "nothing", tmp_path / "out", overrides=[*SMALL, "--mock-data"])
