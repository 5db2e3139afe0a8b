"""Refused models, correction biases, checkpoints and adapters."""

import json
import queue
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kha_megatron.conversion.to_hf import plan_export
from kha_megatron.errors import CheckpointError
from kha_megatron.hf import KHAModelConfig, read_kha
from tests.bridge import cases
from tests.bridge.models import described, tokens
from tests.distributed.launcher import RankError

BIAS = "mlp.gate.e_score_correction_bias"


def change(source, target, drop=(), add=(), **config):
    """Copy a directory, with tensors removed or added and configuration fields changed."""
    shutil.copytree(source, target)
    file = target / "model.safetensors"
    tensors = {k: v for k, v in load_file(file).items() if k not in drop}
    save_file(tensors | {name: torch.ones(2) for name in add}, file, metadata={"format": "pt"})
    path = target / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return str(target)


def refusal(folder, overrides):
    with pytest.raises(CheckpointError) as refused:
        cases.build(folder, "local", **overrides)
    return str(refused.value)


@pytest.mark.parametrize(
    ("name", "changes", "overrides", "message"),
    [
        (
            "dense",
            {"add": ["model.layers.4.mlp.up_proj.weight"]},
            {},
            "Not in Megatron: model.layers.4.mlp.up_proj.weight",
        ),
        (
            "sigmoid",
            {"drop": ["model.layers.2.mlp.experts.5.up_proj.weight"]},
            {},
            "Missing in the Hugging Face checkpoint: model.layers.2.mlp.experts.5.up_proj.weight",
        ),
        ("dense", {}, {"kha_query": None}, "kha_query is None and 'linear'"),
        (
            "sigmoid",
            {},
            {"moe_router_enable_expert_bias": False},
            f"moe_router_enable_expert_bias is not set: model.layers.1.{BIAS}",
        ),
        ("baseline", {"hidden_act": "relu"}, {}, "hidden_act='relu'"),
        ("moh", {}, {"kha_moh": None}, "kha_moh is None and {'shared': 1, "),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mismatched_models_are_refused(
    bridge_ranks,
    folders,
    tmp_path,
    name,
    changes,
    overrides,
    message,
):
    folder = change(folders[name], tmp_path / "in", **changes)
    assert message in bridge_ranks(refusal, 1, folder, overrides)[0]


def export(folder, target, overrides, options, config_only=False):
    auto, model = cases.build(folder, "local", load=False, **overrides)
    if config_only:
        from megatron.bridge import AutoBridge

        auto = AutoBridge.from_hf_config(cases.auto_bridge(folder).hf_pretrained.config)
    cases.write(auto, model, target, **options)


def test_a_router_without_biases_is_exported_with_zeros(bridge_ranks, folders, tmp_path):
    """With a directory and with a configuration."""
    file = tmp_path / "in" / "model.safetensors"
    folder = change(folders["sigmoid"], tmp_path / "in")
    zero = load_file(file)
    for name, tensor in zero.items():
        if BIAS in name:
            tensor.zero_()
    save_file(zero, file, metadata={"format": "pt"})
    without = {"moe_router_enable_expert_bias": False}
    bridge_ranks(export, 1, folder, str(tmp_path / "out"), without, {})
    bridge_ranks(export, 1, folder, str(tmp_path / "config"), without, {}, config_only=True)
    for out in ("out", "config"):
        written = cases.tensors(str(tmp_path / out))
        assert written.keys() == zero.keys()
        for layer in (1, 2, 3):
            assert torch.equal(written[f"model.layers.{layer}.{BIAS}"], torch.zeros(6))


def test_correction_biases_stay_float32(bridge_ranks, folders, tmp_path):
    target = str(tmp_path / "out")
    bridge_ranks(export, 1, folders["sigmoid"], target, {}, {"weight_dtype": torch.bfloat16})
    biases = set()
    others = set()
    for name, tensor in cases.tensors(target).items():
        dtypes = biases if name.endswith(BIAS) else others
        dtypes.add(tensor.dtype)
    assert biases == {torch.float32}
    assert others == {torch.bfloat16}


def through_a_checkpoint(folder, megatron, target, config_only, hybrid):
    """Write a Megatron checkpoint with Bridge, load it into a new model and export that."""
    auto, model = cases.build(folder, "te", hybrid=hybrid)
    from megatron.bridge import AutoBridge
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    # Megatron would start a manager process for this queue, which daemonic ranks cannot do.
    filesystem_async._results_queue = queue.Queue()
    with cases.quiet():
        auto.save_megatron_model(model, megatron, hf_tokenizer_path=folder)
        if config_only:
            auto = AutoBridge.from_auto_config(megatron, folder)
        loaded = auto.load_megatron_model(megatron, wrap_with_ddp=False)
    cases.write(auto, loaded, target)
    return type(loaded[0].config).__name__, str(read_kha(loaded[0].config))


@pytest.mark.parametrize(
    ("name", "kha", "config_only", "hybrid"),
    [
        ("sigmoid", "value=mlp", False, False),
        ("sigmoid", "value=mlp", True, True),
        ("gated", "value=mlp gate(output=element)", True, False),
        # The configuration has the scale of the auxiliary loss.
        ("moh", "value=linear moh(shared=1, active=(2, 3, 1, 2))", False, False),
        ("moh", "value=linear moh(shared=1, active=(2, 3, 1, 2))", False, True),
    ],
)
def test_round_trip_through_a_megatron_checkpoint(
    bridge_ranks,
    folders,
    tmp_path,
    name,
    kha,
    config_only,
    hybrid,
):
    target = str(tmp_path / "out")
    megatron = str(tmp_path / "megatron")
    source = folders[name]
    arguments = (source, megatron, target, config_only, hybrid)
    built = bridge_ranks(through_a_checkpoint, 1, *arguments)[0]
    with pytest.raises(CheckpointError, match=r"was saved by Megatron-Bridge\..*export_ckpt"):
        plan_export(Path(megatron))
    assert built == ("KHAHybridModelProvider" if hybrid else "KHAModelProvider", kha)
    before = cases.tensors(source)
    after = cases.tensors(target)
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[key]) for key, tensor in before.items())
    first, second = (described(KHAModelConfig.from_pretrained(f)) for f in (source, target))
    assert {k: v for k, v in second.items() if first.get(k) != v} == {}


def adapted(folder, target):
    """Export a model with new adapters on ``linear_qkv``. Return the error message, if any."""
    auto, model = cases.build(folder, "local")
    from megatron.bridge.peft.lora import LoRA

    with cases.quiet():
        model = LoRA(target_modules=["linear_qkv"], dim=2)(model, training=True)
    try:
        cases.write(auto, model, target)
    except CheckpointError as error:
        return str(error)
    return None


def test_adapters_on_additional_rows_are_refused(bridge_ranks, folders, tmp_path):
    out = str(tmp_path / "out")
    assert bridge_ranks(adapted, 1, folders["tied"], out)[0] is None
    before = cases.tensors(folders["tied"])
    after = cases.tensors(out)
    assert all(torch.equal(tensor, after[key]) for key, tensor in before.items())
    message = bridge_ranks(adapted, 1, folders["gated"], str(tmp_path / "none"))[0]
    assert "linear_qkv" in message
    assert "(query, gate_output, key, value)" in message


def with_adapters(folder, target, implementation, layout, targets, length=7):
    """Export a model with adapters that change the outputs. Return its logits."""
    auto, model = cases.build(folder, implementation, layout, parallel_output=False)
    from megatron.bridge.peft.lora import LoRA

    with cases.quiet():
        model = LoRA(target_modules=targets, dim=2)(model, training=False)
    torch.manual_seed(11)
    with torch.no_grad():
        for name, weight in model[0].named_parameters():
            if name.endswith("adapter.linear_out.weight"):
                weight.normal_()
    found = cases.logits(model, tokens()[:, :length]).numpy()
    cases.write(auto, model, target)
    return found


@pytest.mark.parametrize(
    ("name", "implementation", "n", "layout", "targets"),
    [
        ("gated_alike", "local", 1, {}, ["linear_proj"]),
        ("gated_heads", "te", 1, {}, ["linear_proj"]),
        ("moh", "local", 1, {}, ["linear_qkv", "linear_proj"]),
        ("moh", "te", 1, {}, ["linear_qkv", "linear_proj"]),
    ],
    ids=str,
)
def test_exported_adapters_compute_the_same(
    bridge_ranks,
    folders,
    tmp_path,
    name,
    implementation,
    n,
    layout,
    targets,
):
    """An adapter must have the input of its projection: gated heads, or the normed input."""
    source = folders[name]
    target = str(tmp_path / "out")
    found = bridge_ranks(with_adapters, n, source, target, implementation, layout, targets)[0]
    before, after = (cases.hf_logits(folder, tokens()) for folder in (source, target))
    assert (before - after).abs().max() > 0.5
    torch.testing.assert_close(
        torch.from_numpy(found)[..., :51],
        after,
        rtol=0,
        atol=1e-5,
    )


def test_adapters_that_gather_the_input_are_refused(bridge_ranks, folders, tmp_path):
    layout = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    args = (folders["moh"], str(tmp_path / "out"), "te", layout, ["linear_qkv"])
    with pytest.raises(RankError, match="target_modules"):
        bridge_ranks(with_adapters, 2, *args, length=6)


def trained_with_lora(folder, target, hybrid):
    """Train adapters for two steps and export. Return what was trained, and the model's logits."""
    auto, model = cases.build(folder, "local", hybrid=hybrid)
    from kha_megatron.bridge.lora import KHALoRA
    from tests.distributed import models

    lora = KHALoRA(target_modules=["linear_qkv", "linear_proj"], dim=2)
    with cases.quiet():
        model = lora(model, training=True)
    lora.set_params_to_save(model)
    before = {name: weight.detach().clone() for name, weight in model[0].named_parameters()}
    optimizer = torch.optim.SGD(model[0].parameters(), lr=10)
    ids, positions, mask = models.batch()
    for _ in range(2):  # the gradients of linear_in are zero in the first step
        optimizer.zero_grad()
        model[0](ids % 51, positions, mask, labels=ids % 51).mean().backward()
        optimizer.step()
    trained = set()
    for name, weight in model[0].named_parameters():
        if not torch.equal(weight, before[name]):
            trained.add(name)
    saved = {name for name in before if lora.adapter_key_filter(name)}
    model[0].eval()
    logits = cases.logits(model, tokens()).numpy()
    cases.write(auto, model, target)
    return trained, saved, logits


@pytest.mark.parametrize("hybrid", [False, True])
def test_lora_also_trains_the_shared_matrices(bridge_ranks, folders, tmp_path, hybrid):
    target = str(tmp_path / "out")
    found = bridge_ranks(trained_with_lora, 1, folders["dense"], target, hybrid)[0]
    trained, saved, logits = found
    names = set()
    for layer in range(4):
        attention = f"decoder.layers.{2 * layer if hybrid else layer}.self_attention"
        for matrix in ("knock_query", "knock_key", "knock_value"):
            names.add(f"{attention}.{matrix}.weight")
        for linear in ("linear_qkv", "linear_proj"):
            names.add(f"{attention}.{linear}.adapter.linear_in.weight")
            names.add(f"{attention}.{linear}.adapter.linear_out.weight")
    assert trained == saved == names
    expected = cases.hf_logits(target, tokens())
    assert (cases.hf_logits(folders["dense"], tokens()) - expected).abs().max() > 0.1
    # merging the adapters rounds the weights, which changed logits by up to 1.6e-5
    torch.testing.assert_close(torch.from_numpy(logits)[..., :51], expected, rtol=0, atol=5e-5)
