"""``kha-megatron eval``: its numbers against the model's own logits, and what it refuses."""

import json
import math
import re
import sys
from importlib.util import find_spec

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from kha_megatron import cli
from kha_megatron.errors import ConfigError, DataError, MissingDependencyError, OutputError
from kha_megatron.hf import KHAForCausalLM, KHAModelConfig

evaluate = sys.modules["kha_megatron.cli.evaluate"]  # the package's attribute is the command

needs_harness = pytest.mark.skipif(
    find_spec("lm_eval") is None,
    reason="lm-evaluation-harness is not installed: pip install 'kha-megatron[eval]'",
)

WORDS = [
    "<|endoftext|>",
    *["the", "a", "cat", "dog", "sat", "ran", "on", "in", "mat", "house", "red", "big"],
]
QUESTIONS = [
    {"q": "the cat", "choices": ["sat on the mat", "ran"], "gold": 0},
    {"q": "a dog ran", "choices": ["in", "on the big red house"], "gold": 1},
    {"q": "the big", "choices": ["dog", "cat", "house"], "gold": 2},
    {"q": "a", "choices": ["mat sat", "red cat ran in"], "gold": 1},
    {"q": "the red dog", "choices": ["sat", "ran"], "gold": 0},
    {"q": "in the house a cat", "choices": ["sat", "on", "ran"], "gold": 2},
    {"q": "big red", "choices": ["the", "mat"], "gold": 1},
]


@pytest.fixture(scope="module")
def tokenizer():
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "the"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|endoftext|>")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory, tokenizer):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("hf") / "model"
    config = KHAModelConfig(
        vocab_size=len(WORDS),
        hidden_size=22,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=10,
        max_position_embeddings=64,
        initializer_range=0.6,
        kha_value="mlp",
    )
    model = KHAForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def task_folder(tmp_path_factory):
    """Two tasks on a local file: which choice is likelier, and how likely the text itself is."""
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "questions.jsonl"
    data.write_text("\n".join(map(json.dumps, QUESTIONS)))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
    }
    choice = {
        "task": "kha_choice",
        "output_type": "multiple_choice",
        "doc_to_text": "{{q}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{gold}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    text = {
        "task": "kha_text",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{q}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    }
    for task in (choice, text):  # JSON is YAML
        (folder / f"{task['task']}.yaml").write_text(json.dumps(common | task))
    group = {
        "group": "kha_group",
        "task": ["kha_choice"],
        "aggregate_metric_list": [{"metric": "acc"}],
    }
    (folder / "group.yaml").write_text(json.dumps(group))
    return folder


def run(*arguments):
    return CliRunner().invoke(cli.app, ["eval", *map(str, arguments)])


@torch.no_grad()
def log_likelihood(model, context: list[int], continuation: list[int]) -> float:
    """Natural logarithm of the probability of the continuation, one plain forward pass."""
    logits = model(torch.tensor([context + continuation])).logits[0]
    log_probabilities = logits[len(context) - 1 : -1].log_softmax(-1)
    return log_probabilities.gather(1, torch.tensor(continuation)[:, None]).sum().item()


def expected(model_folder, tokenizer, questions=QUESTIONS):
    model = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    hits, total, words, size = [], 0.0, 0, 0
    for entry in questions:
        context = tokenizer(entry["q"])["input_ids"]
        scores = [
            log_likelihood(model, context, tokenizer(choice)["input_ids"])
            for choice in entry["choices"]
        ]
        assert len(set(scores)) == len(scores)
        hits.append(scores.index(max(scores)) == entry["gold"])
        total += log_likelihood(model, [tokenizer.eos_token_id], context)
        words += len(entry["q"].split())
        size += len(entry["q"])
    return {
        "acc": sum(hits) / len(hits),
        "word_perplexity": math.exp(-total / words),
        "bits_per_byte": -total / size / math.log(2),
    }


@needs_harness
@pytest.mark.parametrize("batch_size", [1, 3])
def test_numbers_are_those_of_the_models_logits(
    model_folder, task_folder, tokenizer, tmp_path, batch_size
):
    file = tmp_path / "report.json"
    result = run(
        model_folder,
        *("--tasks", "kha_choice,kha_text", "--include-path", task_folder),
        *("--batch-size", batch_size, "--device", "cpu", "--output", file, "--json"),
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report == json.loads(file.read_text())
    wanted = expected(model_folder, tokenizer)
    assert 0 < wanted["acc"] < 1, "an accuracy of 0 or 1 proves little"
    tasks = report["tasks"]
    assert tasks["kha_choice"]["metrics"] == {"acc": wanted["acc"]}
    assert tasks["kha_choice"]["documents"] == tasks["kha_text"]["documents"] == len(QUESTIONS)
    for name in ("word_perplexity", "bits_per_byte"):
        # sums of float32 logarithms, batched with padding or not
        assert tasks["kha_text"]["metrics"][name] == pytest.approx(wanted[name], rel=1e-5)
    accuracy = wanted["acc"]
    error = math.sqrt(accuracy * (1 - accuracy) / (len(QUESTIONS) - 1))
    assert tasks["kha_choice"]["stderr"]["acc"] == pytest.approx(error)
    assert (report["model_type"], report["dtype"]) == ("kha", "float32")


@needs_harness
def test_limit_dtype_and_the_table(model_folder, task_folder, tokenizer):
    result = run(
        model_folder,
        *("--tasks", "kha_choice", "--include-path", task_folder),
        *("--limit", 3, "--dtype", "bfloat16", "--num-fewshot", 0, "--device", "cpu"),
    )
    assert result.exit_code == 0, result.output
    accuracy = expected(model_folder, tokenizer, QUESTIONS[:3])["acc"]
    assert "bfloat16" in result.stdout
    row = re.search(r"kha_choice.*", result.stdout)[0]
    assert re.findall(r"[\w.]+", row)[:3] == ["kha_choice", "acc", f"{accuracy:.4f}"]
    assert re.findall(r"[\w.]+", row)[-2:] == ["3", "0"]


@needs_harness
def test_a_group_is_reported_with_its_tasks(model_folder, task_folder):
    result = run(model_folder, "--tasks", "kha_group", "--include-path", task_folder, "--json")
    assert result.exit_code == 0, result.output
    tasks = json.loads(result.stdout)["tasks"]
    assert tasks.keys() == {"kha_group", "kha_choice"}
    assert tasks["kha_group"]["metrics"] == tasks["kha_choice"]["metrics"]


@needs_harness
def test_an_unknown_task_is_named(model_folder, task_folder, monkeypatch, tmp_path):
    from lm_eval.tasks import manager

    # The harness finds its own task files beside this one; reading all of them takes 10 s.
    monkeypatch.setattr(manager, "__file__", str(tmp_path / "manager.py"))
    result = run(model_folder, "--tasks", "kha_choice,no_such_task", "--include-path", task_folder)
    assert isinstance(result.exception, ConfigError)
    assert re.search("no task is called no_such_task: .*--include-path", str(result.exception))


@needs_harness
def test_data_that_is_not_there_is_named(model_folder, tmp_path):
    task = {
        "task": "kha_lost",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "lost.jsonl")}},
        "test_split": "test",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{q}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    }
    (tmp_path / "lost.yaml").write_text(json.dumps(task))
    result = run(model_folder, "--tasks", "kha_lost", "--include-path", tmp_path)
    assert isinstance(result.exception, DataError)
    assert re.search("kha_lost cannot be loaded .*lost.jsonl", str(result.exception))
    assert "\n" not in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("--tasks", "a,,b"), ConfigError, "'a,,b' holds an empty name"),
        (("--tasks", "a", "--output", __file__), OutputError, "exists: name a new file"),
        (("--tasks", "a", "--output", "/nowhere/x"), OutputError, "/nowhere is no folder"),
    ],
)
def test_bad_input_is_refused_before_any_work(monkeypatch, arguments, error, message):
    monkeypatch.setattr(evaluate, "require_harness", lambda: None)
    result = run("no-model", *arguments)
    assert type(result.exception) is error
    assert re.search(message, str(result.exception))


def test_a_missing_harness_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setattr(evaluate, "find_spec", lambda name: None)
    result = run("no-model", "--tasks", "a")
    assert isinstance(result.exception, MissingDependencyError)
    assert "pip install 'kha-megatron[eval]'" in str(result.exception)


def test_help_has_an_example():
    result = run("--help")
    assert result.exit_code == 0
    assert "kha-megatron eval out/hf --tasks" in result.stdout
