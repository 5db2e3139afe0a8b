"""Test the arguments of the entry point, as Megatron's own parser reads them."""

import os
import sys
from unittest import mock

import pytest

from kha_megatron.config import KHAConfig
from kha_megatron.errors import ConfigError, DataError, KHAError
from kha_megatron.mcore import cpu
from kha_megatron.training.arguments import choose_device
from tests.training.conftest import MODEL, TRAINING, start, started_anew

MOCK = ["--mock-data", "--vocab-size", "90"]
MLP = ["--kha-preset", "kha_mlp"]


def _checked(lines):
    """For each command line of a run of 8 ranks, its configuration or the error that refuses it."""
    from megatron.training.arguments import parse_args

    from kha_megatron.model.rules import check_attention
    from kha_megatron.training.arguments import (
        add_kha_arguments,
        check_args,
        kha_from_args,
    )

    def one(words):
        sys.argv = ["training", *MODEL, *TRAINING, "--global-batch-size", "24", *words]
        os.environ["WORLD_SIZE"] = "8"
        try:
            args = parse_args(add_kha_arguments)
            check_args(args)
            kha = kha_from_args(args)
            check_attention(vars(args), kha)
            return kha
        except KHAError as error:
            return error

    before = sys.argv, os.environ["WORLD_SIZE"]
    try:
        return [one(words) for words in lines]
    finally:
        sys.argv, os.environ["WORLD_SIZE"] = before


@pytest.fixture
def checked(ranks):
    return lambda *lines: ranks(_checked, 1, lines)[0]


def test_a_preset_and_what_overrides_it(checked):
    answers = checked(
        [*MOCK, *MLP],
        [*MOCK, "--kha-preset", "kha_linear", "--kha-query", "none", "--kha-value", "mlp"],
        [*MOCK, "--kha-key", "gate", "--kha-init", "random", "--kha-init-seed", "5"],
        [*MOCK, "--kha-preset", "baseline"],
    )
    assert answers == [
        KHAConfig(value="mlp"),
        KHAConfig(key="linear", value="mlp"),
        KHAConfig(key="gate", init="random", init_seed=5),
        KHAConfig(),
    ]


def test_folding_is_chosen_by_the_run_not_by_the_model(checked):
    linear = ["--kha-preset", "kha_linear"]
    plain, never, always, nothing = checked(
        [*MOCK, *linear],
        [*MOCK, *linear, "--kha-fold", "never"],
        [*MOCK, *linear, "--kha-fold", "always"],
        [*MOCK, *MLP, "--kha-fold", "always"],
    )
    assert [kha.fold for kha in (plain, never, always)] == ["auto", "never", "always"]
    assert plain == never == always
    assert "kha_fold=always needs a linear variant to fold, got value=mlp" in str(nothing)


TIED = ["--kha-attention", "gta", "--kv-channels", "8"]


def test_a_kind_of_attention_and_what_contradicts_it(checked):
    linear = ["--kha-preset", "kha_linear"]
    lines = [
        ([*MLP, *TIED, "--rotary-percent", "0.5"], KHAConfig(value="mlp", attention="gta")),
        ([*linear, *TIED, "--rotary-percent", "0.5"], "kha_key must be none, got linear"),
        ([*MLP, "--kha-attention", "gta", "--rotary-percent", "0.5"], "a multiple of 4"),
        ([*linear, "--kha-attention", "gla"], "kha_attention=gla needs --multi-latent-attention"),
        ([*MLP, "--multi-latent-attention"], "supports only linear KHA, got value=mlp"),
        ([*linear, "--multi-latent-attention"], KHAConfig.from_preset("kha_linear")),
        ([*linear, "--kha-latent-heads", "4"], "only with kha_attention=gla, got 4"),
    ]
    for (_, want), answer in zip(
        lines, checked(*([*MOCK, *words] for words, _ in lines)), strict=True
    ):
        assert answer == want if isinstance(want, KHAConfig) else want in str(answer), answer


def _checked_with_variable(lines):
    with mock.patch.dict(os.environ, {"KHA_CONFIG": '{"value": "gate"}'}):
        return _checked(lines)


def test_settings_for_stock_scripts_are_not_ignored(ranks):
    (answer,) = ranks(_checked_with_variable, 1, [[*MOCK, *MLP]])[0]
    assert isinstance(answer, ConfigError)
    assert "KHA_CONFIG is for --spec in stock scripts: unset it" in str(answer)


def test_what_cannot_train_is_refused_in_one_line(checked, corpus, tmp_path):
    tensor = "--tensor-model-parallel-size"
    prefix = corpus[1]
    folder = tmp_path / "nowhere"
    cases = [
        ([*MOCK, *MLP, tensor, "3"], ConfigError, "cannot be divided over 3"),
        ([*MOCK, "--kha-preset", "kha_mpl"], ConfigError, "Unknown KHA preset 'kha_mpl'"),
        ([*MOCK, "--kha-value", "lienar"], ConfigError, "got 'lienar'"),
        (MOCK, ConfigError, "no KHA configuration: give --kha-preset"),
        ([*MOCK, *MLP, "--spec", "a", "b"], ConfigError, "remove --spec"),
        ([*MOCK, *MLP, "--inprocess-restart"], ConfigError, "remove --inprocess-restart"),
        ([*MOCK, *MLP, "--reset-attention-mask"], ConfigError, "use --transformer-impl local"),
        (
            [*MOCK, *MLP, "--num-experts", "4", "--moe-router-bias-update-rms"],
            ConfigError,
            "add --moe-router-enable-expert-bias",
        ),
        ([*MOCK, *MLP, "--kha-log-interval", "9"], ConfigError, "--kha-log-interval 9: expected"),
        ([*MOCK, *MLP, "--kha-perturb-embedding", "nan"], ConfigError, "nan: expected a share"),
        ([*MOCK, "--heads", "talking.max_tokens=27"], ConfigError, "max_tokens=27 tokens, got 28"),
        ([*MLP, *corpus[2:]], DataError, "No training data given"),
        (
            [*MLP, *corpus[2:], "--data-path", "0.3", prefix, "0.7", str(folder)],
            DataError,
            f"--data-path {folder}: {folder}.bin does not exist",
        ),
    ]
    for (words, kind, message), answer in zip(
        cases, checked(*(words for words, _, _ in cases)), strict=True
    ):
        assert type(answer) is kind, (words, answer)
        assert message in str(answer)
        assert "\n" not in str(answer)


def test_what_can_train_is_let_through(checked, corpus):
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
    ]
    answers = checked(*([*MLP, *words] for words in lines))
    assert answers == [KHAConfig(value="mlp")] * len(lines)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "cpu", "--transformer-impl", "inference_optimized"], "not inference_opt"),
        (["--device=cpu", "--distributed-backend=nccl"], "--distributed-backend gloo, not nccl"),
    ],
)
def test_the_cpu_refuses_what_only_cuda_has(words, message, monkeypatch):
    monkeypatch.setattr(cpu, "install", lambda **_: None)
    for name in cpu.ENVIRONMENT:
        monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match=message):
        choose_device(["training", *words])


def test_the_cpu_adds_only_the_flags_that_are_not_given(monkeypatch, capsys):
    monkeypatch.setattr(cpu, "install", lambda **_: None)
    for name in cpu.ENVIRONMENT:
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv("RANK", raising=False)
    words = ["training", "--device", "cpu", "--transformer-impl=local", "--no-rope-fusion"]
    choose_device(words)
    assert words.count("--no-rope-fusion") == 1
    assert "--transformer-impl" not in words
    assert words[words.index("--distributed-backend") + 1] == "gloo"
    assert "--no-persist-layer-norm" in capsys.readouterr().err


def test_a_gpu_without_apex_trains_without_its_fusion(monkeypatch):
    """Megatron's output layer would raise when it is built, with either implementation."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    flag = "--no-gradient-accumulation-fusion"
    for given in ([], [flag]):
        words = ["training", "--transformer-impl", "local", *given]
        choose_device(words)
        assert words.count(flag) == 1


def test_real_processes_refuse_with_code_2_and_one_line(tmp_path):
    """Two ranks of one machine: one of them speaks."""
    words = [*MODEL, *TRAINING, *MLP, "--data-path", str(tmp_path / "nowhere")]
    run = start(["--device", "cpu", *words], 2)
    assert run.codes == [2, 2]
    assert len(run.errors) == 1
    assert "nowhere.bin" in run.errors[0]
    assert "Traceback" not in run.output


def test_cuda_is_refused_on_a_machine_without_one(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    run = started_anew([*MODEL, *TRAINING, *MLP, *MOCK])
    assert run.codes == [2]
    assert run.errors == ["error: no CUDA device found: add --device cpu to train on the CPU"]
