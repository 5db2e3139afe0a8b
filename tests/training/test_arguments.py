"""Test the arguments of the entry point, as Megatron's own parser reads them."""

import os
import sys
from argparse import Namespace
from unittest import mock

import pytest

from kha_megatron.errors import ConfigError, DataError, KHAError
from kha_megatron.heads import Knock
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.model.rules import check_attention
from kha_megatron.training.arguments import (
    add_kha_arguments,
    check_args,
    choose_device,
    kha_from_args,
    set_layer_pattern,
)
from tests.training.conftest import MODEL, TRAINING, start

MOCK = ["--mock-data", "--vocab-size", "90"]
MLP = ["--kha-preset", "kha_mlp"]


def _checked(lines, environment):
    """Return for each command line of 8 ranks its configuration or the error that refuses it."""
    from megatron.training.arguments import parse_args

    def check(words):
        sys.argv = ["training", *MODEL, *TRAINING, "--global-batch-size", "24", *words]
        try:
            args = parse_args(add_kha_arguments)
            check_args(args)
            kha = kha_from_args(args)
            check_attention(vars(args), kha)
            return kha
        except KHAError as error:
            return error

    with mock.patch.object(sys, "argv"), mock.patch.dict(os.environ, environment):
        return [check(words) for words in lines]


@pytest.fixture
def checked(ranks):
    return lambda *lines, **environment: ranks(
        _checked,
        1,
        lines,
        {"WORLD_SIZE": "8"} | environment,
    )[0]


TIED = ["--kha-attention", "gta", "--kv-channels", "8", "--rotary-percent", "0.5"]
LINEAR = ["--kha-preset", "kha_linear"]
FILES = ["--per-dataset-sequences-path", "--data-args-path", "--per-split-data-args-path"]
SOAP = ["--optimizer", "soap", "--save-interval", "2"]
RESET = ["--reset-attention-mask", "--transformer-impl", "local"]


def test_head_arguments_are_parsed(checked):
    cases = [
        (MLP, HeadsConfig(Knock(value="mlp"))),
        (
            [*LINEAR, "--kha-query", "none", "--kha-value", "mlp"],
            HeadsConfig(Knock(key="linear", value="mlp")),
        ),
        (
            ["--kha-key", "gate", "--kha-init", "random", "--kha-init-seed", "5"],
            HeadsConfig(Knock(key="gate", init="random"), init_seed=5),
        ),
        (["--kha-preset", "baseline"], HeadsConfig()),
        ([*MLP, *TIED], HeadsConfig(Knock(value="mlp"), attention="gta")),
        ([*LINEAR, "--multi-latent-attention"], HeadsConfig.from_preset("kha_linear")),
    ]
    answers = checked(*([*MOCK, *words] for words, _ in cases))
    assert answers == [kha for _, kha in cases]


def test_runs_that_cannot_train_are_refused(checked, corpus, tmp_path):
    prefix = corpus[1]
    missing = tmp_path / "nowhere"
    config_errors = [
        ([*MLP, "--tensor-model-parallel-size", "3"], "over 3 tensor-parallel ranks"),
        (["--kha-preset", "kha_mpl"], "'kha_mpl'"),
        (["--kha-value", "lienar"], "'lienar'"),
        ([], "Pass --kha-preset"),
        ([*MLP, "--spec", "a", "b"], "--spec is not supported"),
        ([*MLP, "--ckpt-format", "torch"], "Use torch_dist"),
        ([*MLP, "--ckpt-format", "torch_dcp"], "Megatron cannot load its own"),
        ([*MLP, "--save", "run", "--save-interval", "0"], "--save requires"),
        ([*MLP, "--kha-perturb-embedding", "nan"], "must be finite, got nan"),
        ([*MLP, "--kha-perturb-embedding", "inf"], "must be finite, got inf"),
        ([*MLP, "--optimizer", "adaptive_muon"], "adaptive_muon is not supported"),
        ([*MLP, *SOAP, "--save", "run"], "cannot save the state of --optimizer soap"),
        ([*MLP, "--optimizer", "sgd", "--use-distributed-optimizer"], "does not support --opt"),
        ([*MLP, "--optimizer", "dist_muon"], "dist_muon requires --bf16"),
        ([*MLP, "--optimizer", "soap", "--use-distributed-optimizer"], "soap requires --bf16"),
        ([*MLP, "--tensor-parallel-num-weight-shards", "4"], "weight-shards 4 is not supported"),
        ([*MLP, "--reset-attention-mask"], "requires --transformer-impl local"),
        ([*MLP, *RESET, "--no-create-attention-mask-in-dataloader"], "has no effect with --no-cr"),
        ([*MLP, "--freeze-all-layers"], "--freeze-all-layers is not supported"),
        ([*MLP, "--logits-save-dir", "logits"], "--logits-save-dir is not supported"),
        (
            [*MLP, "--num-experts", "4", "--moe-router-bias-update-rms"],
            "requires --moe-router-enable-expert-bias",
        ),
        ([*MLP, "--rope-low-freq-factor", "2"], "-factor requires --use-rope-scaling. Add it, or"),
        ([*LINEAR, "--kha-attention", "gla"], "--multi-latent-attention"),
        ([*LINEAR, "--kha-latent-heads", "4"], "got 4"),
        ([*MLP, "--save-interval-in-mins", "-0.5"], "must not be negative, got -0.5"),
        ([*MLP, "--kha-log-interval", "-1"], "--kha-log-interval must not be negative"),
        ([*LINEAR, "--kha-fold-linear", "--use-torch-fsdp2"], "does not support FSDP"),
    ]
    data = ["--data-path", "0.3", prefix, "0.7", str(missing)]
    cases = [
        *(([*MOCK, *words], ConfigError, message) for words, message in config_errors),
        ([*MLP, *corpus[2:]], DataError, "training data given"),
        ([*MLP, *corpus[2:], *data], DataError, f"{missing}.idx"),
        ([*MLP, *MOCK, "--tokenizer-model", str(missing)], DataError, f"{missing} does not exist"),
        *(([*MLP, *MOCK, flag, str(missing)], DataError, f"{flag} {missing}") for flag in FILES),
    ]
    answers = checked(*(words for words, _, _ in cases))
    for (words, kind, message), answer in zip(cases, answers, strict=True):
        assert type(answer) is kind, (words, answer)
        assert message in str(answer)
        assert "\n" not in str(answer)


def test_a_requeued_job_does_not_go_back_to_its_first_checkpoint(checked):
    words = [*MLP, *MOCK, "--ckpt-step", "5"]
    assert checked(words) == [HeadsConfig(Knock(value="mlp"))]
    (error,) = checked(words, SLURM_RESTART_COUNT="1")
    assert "--ckpt-step 5 would load that iteration again" in str(error)


@pytest.mark.parametrize(
    ("ranks", "pattern"),
    [
        (1, "*-*E*E*E/*E"),
        (2, "*-*E|*E*E/*E"),
        (4, "*-|*E|*E|*E/*E"),
    ],
)
def test_a_saved_pattern_is_split_again_if_its_stages_do_not_fit(ranks, pattern):
    """Experts and multi-token prediction stay where they were."""
    saved = {
        "hybrid_layer_pattern": "*-*E|*E*E/*E",
        "moe_layer_freq": 1,
        "mtp_num_layers": 1,
        "num_layers": None,
        "num_experts": 4,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "gpt_model": False,
    }
    args = Namespace(**saved, pipeline_model_parallel_size=ranks)
    set_layer_pattern(args, pattern_is_saved=True)
    assert args.hybrid_layer_pattern == pattern
    args = Namespace(**saved, pipeline_model_parallel_size=ranks)
    set_layer_pattern(args)
    assert args.hybrid_layer_pattern == saved["hybrid_layer_pattern"]


def test_kha_config_variable_is_refused(monkeypatch):
    monkeypatch.setenv("KHA_CONFIG", '{"value": "gate"}')
    with pytest.raises(ConfigError, match="KHA_CONFIG only applies to layer specs"):
        kha_from_args(None)


def test_runs_that_can_train_are_accepted(checked, corpus):
    prefix = corpus[1]
    lines = [
        corpus,
        [*corpus, "--kha-log-interval", "9", "--tensorboard-dir", "tensorboard"],
        [*corpus[2:], "--data-path", prefix, prefix],
        [*corpus[2:], "--data-path", "1", prefix],
        [*corpus[2:], "--train-data-path", prefix, "--valid-data-path", prefix],
        [*corpus[2:], "--data-path", "msc://bucket/corpus"],
        [*corpus[:4], "--tokenizer-model", "organisation/a-model-on-a-hub"],
        # more ranks than key/value heads
        [*corpus, "--tensor-model-parallel-size", "8"],
        [*corpus, "--use-checkpoint-args", "--ffn-hidden-size", "3"],
        [*corpus, "--decrease-batch-size-if-needed", "--global-batch-size", "25"],
        [*corpus, "--optimizer", "dist_muon", "--bf16"],
        [*corpus, *SOAP, "--save", "run", "--no-save-optim"],
        [*corpus, "--use-rope-scaling", "--rope-low-freq-factor", "2"],
        [*corpus, "--tensor-model-parallel-size", "4", "--tensor-parallel-num-weight-shards", "4"],
    ]
    answers = checked(*([*MLP, *words] for words in lines))
    assert answers == [HeadsConfig(Knock(value="mlp"))] * len(lines)


def test_a_gpu_without_apex_trains_without_its_fusion(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    flag = "--no-gradient-accumulation-fusion"
    monkeypatch.setattr("kha_megatron.training.arguments.lacks_te_extension", lambda: False)
    local = ["--transformer-impl", "local"]
    fsdp = ["--use-torch-fsdp2"]
    for given, count in (([], 0), (local, 1), ([*local, flag], 1), (fsdp, 1)):
        words = ["training", *given]
        choose_device(words)
        assert words.count(flag) == count


def hide_muon(rank):
    sys.modules["emerging_optimizers"] = None


def test_ranks_refuse_with_code_2_and_one_line():
    muon = [*MOCK, "--optimizer", "muon"]
    for words, message in ((["--data-path", "/nowhere"], "/nowhere.idx"), (muon, "'.[muon]'")):
        run = start(["--device", "cpu", *MODEL, *TRAINING, *MLP, *words], 2, before=hide_muon)
        assert run.codes == [2, 2]
        assert [message in error for error in run.errors] == [True]
        assert "Traceback" not in run.output


def test_cuda_is_refused_on_a_machine_without_one(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"found \(torch .* CUDA 1.* add --device cpu"):
        choose_device(["training", *MODEL])
