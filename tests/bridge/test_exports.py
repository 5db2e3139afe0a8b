"""What the bridge refuses where Megatron-Bridge would log a warning, and what it adds."""

import json
import queue
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from kha_megatron.errors import CheckpointError
from kha_megatron.hf import KHAModelConfig, read_kha
from tests.bridge import cases
from tests.bridge.models import described, tokens
from tests.distributed.launcher import RankError

BIAS = "mlp.gate.e_score_correction_bias"


def change(source, target, drop=(), add=(), **config):
    """A copy of a folder with some tensors fewer or more, and another configuration."""
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
            "without a place in Megatron: model.layers.4.mlp.up_proj.weight",
        ),
        (
            "sigmoid",
            {"drop": ["model.layers.2.mlp.experts.5.up_proj.weight"]},
            {},
            "missing in the folder: model.layers.2.mlp.experts.5.up_proj.weight",
        ),
        ("dense", {}, {"kha_query": None}, "kha_query None against 'linear'"),
        (
            "sigmoid",
            {},
            {"moe_layer_freq": [1] * 4},
            "moe_layer_freq 1 against [0, 1, 1, 1]",
        ),
        (
            "sigmoid",
            {},
            {"moe_router_enable_expert_bias": False},
            f"without moe_router_enable_expert_bias, and not zero: model.layers.1.{BIAS}",
        ),
        ("baseline", {"hidden_act": "relu"}, {}, "hidden_act='relu'"),
        ("moh", {}, {"kha_moh": None}, "kha_moh None against {'shared': 1, "),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused_by_name(bridge_ranks, folders, tmp_path, name, changes, overrides, message):
    folder = change(folders[name], tmp_path / "in", **changes)
    assert message in bridge_ranks(refusal, 1, folder, overrides)[0]


def export(folder, target, overrides, options):
    auto, model = cases.build(folder, "local", load=False, **overrides)
    cases.write(auto, model, target, **options)


def test_a_router_without_biases_is_exported_with_zeros(bridge_ranks, folders, tmp_path):
    """Which is what the architecture calls training without; into a folder, and from a config."""
    file = tmp_path / "in" / "model.safetensors"
    folder = change(folders["sigmoid"], tmp_path / "in")
    zero = {k: torch.zeros_like(v) if BIAS in k else v for k, v in load_file(file).items()}
    save_file(zero, file, metadata={"format": "pt"})
    without = {"moe_router_enable_expert_bias": False}
    bridge_ranks(export, 1, folder, str(tmp_path / "out"), without, {})
    bridge_ranks(export_config_only, 1, folder, str(tmp_path / "config"), without)
    for out in ("out", "config"):
        written = cases.tensors(str(tmp_path / out))
        assert written.keys() == zero.keys()
        for layer in (1, 2, 3):
            assert torch.equal(written[f"model.layers.{layer}.{BIAS}"], torch.zeros(6))


def export_config_only(folder, target, overrides):
    from megatron.bridge import AutoBridge

    _, model = cases.build(folder, "local", load=False, **overrides)
    config = cases.auto_bridge(folder).hf_pretrained.config
    cases.write(AutoBridge.from_hf_config(config), model, target)


def test_correction_biases_stay_float32(bridge_ranks, folders, tmp_path):
    target = str(tmp_path / "out")
    bridge_ranks(export, 1, folders["sigmoid"], target, {}, {"weight_dtype": torch.bfloat16})
    dtypes = {key.endswith(BIAS): tensor.dtype for key, tensor in cases.tensors(target).items()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}


def through_a_checkpoint(folder, megatron, target, config_only):
    """Write a Megatron checkpoint as Bridge does, read it in a model of its own, export that."""
    auto, model = cases.build(folder, "te")
    from megatron.bridge import AutoBridge
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    # Megatron would start a manager process for this queue, which a daemonic rank may not
    filesystem_async._results_queue = queue.Queue()
    with cases.quiet():
        auto.save_megatron_model(model, megatron, hf_tokenizer_path=folder)
        if config_only:
            auto = AutoBridge.from_auto_config(megatron, folder)
        loaded = auto.load_megatron_model(megatron, wrap_with_ddp=False)
    cases.write(auto, loaded, target)
    return type(loaded[0].config).__name__, str(read_kha(loaded[0].config))


@pytest.mark.parametrize("config_only", [False, True])
@pytest.mark.parametrize(
    ("name", "kha"),
    [
        ("sigmoid", "value=mlp"),
        ("gated", "value=mlp gate(output=element)"),
        ("moh", "value=linear moh(shared=1, active=(2, 3, 1, 2))"),
    ],
)
def test_through_a_megatron_checkpoint(bridge_ranks, folders, tmp_path, name, kha, config_only):
    """A loss of its own leaves its scale in the configuration, which is written with it."""
    target, megatron = str(tmp_path / "out"), str(tmp_path / "megatron")
    source = folders[name]
    built = bridge_ranks(through_a_checkpoint, 1, source, megatron, target, config_only)[0]
    assert built == ("KHAModelProvider", kha)
    before, after = cases.tensors(source), cases.tensors(target)
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[key]) for key, tensor in before.items())
    first, second = (described(KHAModelConfig.from_pretrained(f)) for f in (source, target))
    assert {k: v for k, v in second.items() if first.get(k) != v} == {}


def adapted(folder, target):
    """Export a model whose ``linear_qkv`` has adapters that add nothing yet; or why not."""
    auto, model = cases.build(folder, "local")
    from megatron.bridge.peft.lora import LoRA

    with cases.quiet():
        model = LoRA(target_modules=["linear_qkv"], dim=2)(model, training=True)
    try:
        cases.write(auto, model, target)
    except CheckpointError as refused:
        return str(refused)
    return None


def test_adapters_of_other_rows_than_qkv_are_refused(bridge_ranks, folders, tmp_path):
    """Bridge cuts an adapter only where it finds three parts, by their names."""
    out = str(tmp_path / "out")
    assert bridge_ranks(adapted, 1, folders["tied"], out)[0] is None
    before, after = cases.tensors(folders["tied"]), cases.tensors(out)
    assert all(torch.equal(tensor, after[key]) for key, tensor in before.items())
    message = bridge_ranks(adapted, 1, folders["gated"], str(tmp_path / "none"))[0]
    assert "linear_qkv" in message
    assert "rows are query, gate_output, key, value" in message


def with_adapters(folder, target, implementation, layout, targets, length=7):
    """Logits of a model whose projections have adapters that add something, which it exports."""
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
def test_adapters_see_what_their_projection_sees(
    bridge_ranks, folders, tmp_path, name, implementation, n, layout, targets
):
    """Gated heads before ``linear_proj``, the normed input before ``linear_qkv``: else the adapter
    that was trained is not the one that is merged."""
    source, target = folders[name], str(tmp_path / "out")
    found = bridge_ranks(with_adapters, n, source, target, implementation, layout, targets)[0]
    before, after = (cases.hf_logits(folder, tokens()) for folder in (source, target))
    assert (before - after).abs().max() > 0.5
    torch.testing.assert_close(torch.from_numpy(found)[..., :51], after, rtol=0, atol=1e-5)


def test_adapters_that_gather_the_normed_input_are_refused(bridge_ranks, folders, tmp_path):
    layout = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    words = (folders["moh"], str(tmp_path / "out"), "te", layout, ["linear_qkv"])
    with pytest.raises(RankError, match="leave linear_qkv out of the adapter's target_modules"):
        bridge_ranks(with_adapters, 2, *words, length=6)
