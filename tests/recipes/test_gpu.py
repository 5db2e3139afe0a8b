"""Settings of recipes for GPUs: in every command line, exact, and accepted by Megatron."""

import os
import re

import pytest
import torch

from kha_megatron.errors import ConfigError
from kha_megatron.model.rules import check_arguments
from kha_megatron.model.run import parse
from kha_megatron.plan.counts import count_model
from kha_megatron.recipes import RECIPES, Slurm, get_recipe, prepare_job
from kha_megatron.recipes.gpu import (
    GPU_ENVIRONMENT,
    GPU_EXPERTS,
    GPU_TRAINING,
    gpu_environment,
    read_compute_capability,
)
from tests.docs.pages import ROOT, commands

ON_GPUS = [name for name, recipe in RECIPES.items() if recipe.run.training.device == "cuda"]
SETTINGS = """--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
--cross-entropy-loss-fusion --manual-gc --manual-gc-interval 100 --num-workers 8 --eval-iters 32
--log-timers-to-tensorboard --log-memory-to-tensorboard"""
EXPERTS = """--moe-grouped-gemm --moe-permute-fusion --moe-router-fusion
--expert-model-parallel-size 8 --moe-router-dtype fp32"""
ENVIRONMENT = {
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "NCCL_GRAPH_REGISTER": "0",
    "NCCL_NVLS_ENABLE": "0",
}


def prepared(name, *words, nodes=1):
    job = prepare_job(
        get_recipe(name),
        dry_run=True,
        overrides=["--mock-data", *words],
        slurm=Slurm(time="01:00:00", nodes=nodes),
    )
    first = job.command.index("kha_megatron.training") + 1
    return job, parse(job.command[first:])


@pytest.mark.parametrize("name", ON_GPUS)
def test_every_recipe_has_the_settings(name):
    job, flags = prepared(name)
    settings = SETTINGS
    if "--num-experts" in flags:
        settings += f" {EXPERTS}"
    assert flags.items() >= parse(settings.split()).items()
    assert job.environment.items() >= ENVIRONMENT.items()
    assert ("--moe-router-fusion" in flags) == ("--num-experts" in flags)
    assert "--cuda-graph-impl" not in flags


@pytest.mark.parametrize(
    ("words", "dropped"),
    [
        ("--fp16", {"--bf16", "--cross-entropy-loss-fusion"}),
        ("--transformer-impl local", {"--moe-grouped-gemm", "--moe-router-fusion"}),
        ("--device cpu", {"--moe-permute-fusion", "--moe-router-fusion"}),
    ],
)
def test_settings_that_do_not_apply_are_dropped(words, dropped, capsys):
    job, flags = prepared("table2/mlp-v", *words.split())
    assert not dropped & set(flags)
    messages = capsys.readouterr().err
    for flag in dropped:
        assert f"Dropping {flag}: excluded by" in messages
    assert ("NCCL_NVLS_ENABLE" in job.environment) == ("--device" not in words)


def test_the_callers_environment_wins_in_local_runs(monkeypatch):
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    job = prepare_job(get_recipe("dense-0.6b"), overrides=["--mock-data"])
    assert job.environment["NCCL_NVLS_ENABLE"] == "1"
    assert prepared("dense-0.6b")[0].environment["NCCL_NVLS_ENABLE"] == "0"


@pytest.mark.parametrize(
    ("words", "hopper", "blackwell"),
    [
        ("", None, None),
        ("--expert-model-parallel-size 8", None, None),
        ("--tensor-model-parallel-size 2", "1", None),
        ("--context-parallel-size 2", "1", None),
        ("--tensor-model-parallel-size 2 --use-megatron-fsdp", None, None),
        ("--tensor-model-parallel-size 2 --use-torch-fsdp2", None, None),
        ("--context-parallel-size 2 --overlap-moe-expert-parallel-comm", None, None),
    ],
)
def test_connections_depend_on_layout_and_architecture(words, hopper, blackwell):
    run = get_recipe("moe-a0.8b-6.6b").run.updated(words.split())
    connections = []
    for compute_capability in (None, 8, 9, 10, 12):
        variables = gpu_environment(run, compute_capability)
        connections.append(variables.get("CUDA_DEVICE_MAX_CONNECTIONS"))
    assert connections == [hopper, hopper, hopper, blackwell, blackwell]


@pytest.mark.parametrize(
    ("output", "expected"),
    [("9.0\\n9.0", 9), ("10.3", 10), ("No devices were found", None), (None, None)],
)
def test_compute_capability_is_read_from_the_driver(output, expected, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    if output is not None:
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/bash\nprintf '{output}\\n'\n")
        tool.chmod(0o755)
    assert read_compute_capability() == expected


def test_local_jobs_look_at_their_gpus(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/bash\necho 10.0\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    words = ["--mock-data", "--tensor-model-parallel-size", "2"]
    local = prepare_job(get_recipe("dense-0.6b"), overrides=words)
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in local.environment
    remote, _ = prepared("dense-0.6b", *words)  # has other GPUs
    assert remote.environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


@pytest.mark.parametrize(
    ("words", "nodes", "size"),
    [
        ("", 1, "4"),
        ("", 16, "4"),
        ("", 32, "2"),
        ("", 64, "1"),
        ("--tensor-model-parallel-size 2 --sequence-parallel", 32, "4"),
        ("--global-batch-size 72", 1, "1"),
        ("--micro-batch-size 8", 1, "8"),
    ],
)
def test_micro_batch_fits_the_replicas(words, nodes, size, capsys):
    _, flags = prepared("table2/mlp-v", *words.split(), nodes=nodes)
    assert flags["--micro-batch-size"] == (size,)
    assert flags["--global-batch-size"] == (("72",) if "72" in words else ("512",))
    assert ("Reducing --micro-batch-size" in capsys.readouterr().err) == (size in ("1", "2"))


def test_global_batch_that_no_micro_batch_divides_is_refused():
    with pytest.raises(ConfigError, match="--global-batch-size"):
        prepared("table2/mlp-v", nodes=3)


def loss_gradients(dtype):
    """Return loss and gradient of logits, by Megatron's fused and unfused loss."""
    from megatron.core import parallel_state
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    from tests.distributed import models

    models.initialize()
    group = parallel_state.get_tensor_model_parallel_group()
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(7, 3, 33, generator=generator).to(dtype)
    targets = torch.randint(33, (7, 3), generator=generator)
    results = []
    for fused in (False, True):
        inputs = logits.clone().requires_grad_()
        # a new tensor, because the fused loss changes float32 logits in place
        copy = inputs * 1
        if fused:
            loss = fused_vocab_parallel_cross_entropy(copy, targets, group)
        else:
            loss = vocab_parallel_cross_entropy(copy, targets)
        loss.sum().backward()
        results.append((loss.detach(), inputs.grad))
    return results


def test_fused_loss_is_exact_in_bfloat16_only(ranks):
    (unfused, fused) = ranks(loss_gradients, 1, torch.bfloat16)[0]
    assert torch.equal(unfused[0], fused[0])
    assert torch.equal(unfused[1], fused[1])
    (unfused, fused) = ranks(loss_gradients, 1, torch.float32)[0]
    assert torch.equal(unfused[0], fused[0])
    rounded = unfused[1].bfloat16().float()
    assert torch.equal(fused[1], rounded)
    assert not torch.equal(fused[1], unfused[1])


@pytest.mark.parametrize("words", ["", "--fp16"])
def test_fused_loss_in_other_precisions_is_refused(words):
    run = get_recipe("quickstart").run.updated(["--cross-entropy-loss-fusion", *words.split()])
    with pytest.raises(ConfigError, match="Add --bf16, or remove --cross-entropy-loss-fusion"):
        check_arguments(run.arguments, 2, run.kha)
    check_arguments(run.updated(["--bf16"]).arguments, 2, run.kha)


def test_comparison_with_bridge_shows_our_job():
    """The third column of the page has the flags and variables of the command in the page."""
    (command,) = commands("docs/bridge_recipes.md")
    words = command.words[command.words.index("--") + 1 :]
    job, flags = prepared(command.words[2], *words, nodes=2)
    assert f"{count_model(job.run.model).total / 1e9:.1f}" == "30.5"  # Qwen3-30B-A3B
    checked = set()
    for line in (ROOT / "docs/bridge_recipes.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if not line.startswith("| ") or cells[2] == "our job":
            continue
        setting, ours = cells[0].strip("`"), cells[2]
        if setting.isupper():
            expected = job.environment.get(setting, "not set").strip("`")
            assert ours.strip("`") == expected, setting
            checked.add(setting)
            continue
        for text in re.findall(r"`(--.*?)`", ours):
            ((flag, values),) = parse(text.split()).items()
            assert (flag in flags) == (f"not `{text}`" not in ours), line
            assert not values or flags[flag] == values, line
            checked.add(flag)
    shown = {flag.replace("_", "-") for flag in (*GPU_TRAINING, *GPU_EXPERTS)}
    assert {f"--{name}" for name in shown - {"device"}} <= checked
    assert checked >= GPU_ENVIRONMENT.keys()
