"""A checkpoint loads under another layout with the same state, outputs and next step.

Loaded state is compared bit for bit, by saving it again. Outputs are compared within ``TOLERANCE``:
another layout reorders sums of a few dozen terms in float32. Adam amplifies the rounding of tiny
gradients: ``STEP_TOLERANCE`` of the length of the step.
"""

import functools
from pathlib import Path

import pytest
import torch

from kha_megatron.checkpoint.integrity import FileChecks
from kha_megatron.checkpoint.torch_dist import TorchDistFolder
from kha_megatron.config import KHAConfig
from kha_megatron.heads import Gate
from kha_megatron.heads.knock import MATRICES, PROJECTIONS
from tests.distributed.launcher import RankError
from tests.distributed.optimizing import Training

FIRST_IMPORT = 400
"""Seconds for a case: the first one imports all of megatron.training on each rank."""

TOLERANCE = 1e-5
STEP_TOLERANCE = 1e-3

KHA = KHAConfig(query="gate", key="linear", value="mlp")
DENSE = {"num_layers": 4}
EXPERTS = {
    "num_layers": 3,
    "moe_layer_freq": [0, 1, 1],
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 24,
    "moe_router_topk": 2,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
}

FOLDABLE = {"query": "linear", "key": "linear", "value": "linear"}
LATENT = {"num_layers": 2, "multi_latent_attention": True}
FAMILY = {
    "mla": (LATENT, KHAConfig(**FOLDABLE)),
    "gla": (LATENT, KHAConfig(attention="gla", **FOLDABLE)),
    "gta": (
        {"num_layers": 2, "kv_channels": 8},
        KHAConfig(attention="gta", query="linear", value="mlp"),
    ),
    "gates": (
        {"num_layers": 2, "num_query_groups": 2},
        KHAConfig(value="mlp", gate=Gate(output="head", value="element", key="shared")),
    ),
}

TP, PP, EP = (f"{kind}_model_parallel_size" for kind in ("tensor", "pipeline", "expert"))
WHOLE = pytest.mark.whole
ONE = (1, {})
FOUR = (4, {TP: 4})
TWO_REPLICAS = (2, {})
"""Ranks, and the sizes by which they differ from data parallelism."""


def error(got, want):
    """Relative error of norms."""
    return ((got - want).norm() / want.norm()).item()


def train_and_save(folder, layout, model, zero, kha=KHA):
    training = Training(layout, model, zero, kha, seed=7)
    for iteration in range(3):
        training.step(iteration)
    return training.go_on(folder)


def load_and_go_on(source, folder, layout, model, zero, kha=KHA):
    training = Training(layout, model, zero, kha, seed=99)
    training.load(f"{source}/state")
    return training.go_on(folder)


def load_weights(source, layout, model):
    training = Training(layout, model, False, KHA, seed=99)
    training.load(f"{source}/state", optimizer=False)
    return training.outputs()


def upcycle(source, layout, model):
    from kha_megatron.mcore.knocking import HeadWeight

    training = Training(layout, model, False, KHA, seed=99, perturbed=False)
    for module in training.model.modules():
        if isinstance(module, HeadWeight):
            module.keep_at_next_load()
    training.load(f"{source}/state", optimizer=False)
    training.save(f"{source}/upcycled")
    return training.outputs()


def summary(results):
    """Losses of the whole batch and the grad norm, which every rank must agree about."""
    outputs = {rank: output for rank, output, _, _ in results if output is not None}
    (norm,) = {norm for _, _, norm, _ in results}
    return torch.cat([outputs[rank] for rank in sorted(outputs)]), norm


def contents(folder):
    """All tensors by name, and what the ranks had in common."""
    opened = TorchDistFolder(Path(folder), FileChecks(Path(folder), {}))
    tensors = {key: opened.read(key) for key in opened.tensors}
    return tensors, opened.read_object("common_state/shard_0_1")[0]


@pytest.fixture(scope="module")
def run(ranks):
    return functools.partial(ranks, timeout=FIRST_IMPORT)


@pytest.fixture(scope="module")
def trained(run, tmp_path_factory):
    """Three steps under a layout, saved; run once for each layout."""

    @functools.cache
    def train(n, sizes, experts, zero):
        folder = tmp_path_factory.mktemp("trained")
        model = EXPERTS if experts else DENSE
        return folder, run(train_and_save, n, str(folder), dict(sizes), model, zero)

    return lambda layout, experts, zero: train(layout[0], tuple(layout[1].items()), experts, zero)


@pytest.mark.parametrize(
    ("before", "after", "experts", "zero"),
    [
        pytest.param((2, {TP: 2}), FOUR, False, False, id="TP2 to TP4", marks=WHOLE),
        pytest.param((2, {PP: 2}), ONE, False, False, id="PP2 to PP1", marks=WHOLE),
        pytest.param(
            TWO_REPLICAS, ONE, False, True, id="DP2 to DP1, distributed optimizer", marks=WHOLE
        ),
        pytest.param(
            (4, {TP: 2}), (2, {PP: 2}), False, True, id="TP2 x DP2 to PP2, distributed optimizer"
        ),
        pytest.param(
            (4, {EP: 4}), (4, {EP: 2}), True, True, id="EP4 to EP2 x DP2, ZeRO", marks=WHOLE
        ),
    ],
)
def test_another_layout_continues_alike(run, trained, tmp_path, before, after, experts, zero):
    source, expected = trained(before, experts, zero)
    model = EXPERTS if experts else DENSE
    results = run(load_and_go_on, after[0], str(source), str(tmp_path), after[1], model, zero)
    _check_alike(source, tmp_path, expected, results)


@pytest.mark.parametrize(
    ("kind", "after"),
    [
        pytest.param("mla", FOUR, id="mla, TP4", marks=WHOLE),
        pytest.param("gla", ONE, id="gla, TP1", marks=WHOLE),
        pytest.param("gta", FOUR, id="gta, TP4", marks=WHOLE),
        pytest.param("gates", FOUR, id="gates, TP4 over 2 key/value heads"),
    ],
)
def test_another_layout_of_other_attentions_continues_alike(
    run, family_trained, tmp_path, kind, after
):
    source, expected = family_trained(kind)
    model, kha = FAMILY[kind]
    results = run(load_and_go_on, after[0], str(source), str(tmp_path), after[1], model, True, kha)
    _check_alike(source, tmp_path, expected, results, len(kha.variants))


@pytest.fixture(scope="module")
def family_trained(run, tmp_path_factory):
    """Three steps with TP2 of each attention that has a layer of its own, saved."""

    @functools.cache
    def train(kind):
        folder = tmp_path_factory.mktemp(kind)
        model, kha = FAMILY[kind]
        return folder, run(train_and_save, 2, str(folder), {TP: 2}, model, True, kha)

    return train


def _check_alike(source, tmp_path, expected, results, knocked=3):
    one, two = contents(source / "state"), contents(tmp_path / "state")
    assert one[0].keys() == two[0].keys()
    moments = [key for key in one[0] if ".exp_avg_sq." in key and ".knock_" in key]
    assert len(moments) >= knocked
    for key, tensor in one[0].items():
        assert torch.equal(tensor, two[0][key]), key
    assert set(_steps(one[1]["optimizer"])) == set(_steps(two[1]["optimizer"])) == {3}

    (output, norm), (other_output, other_norm) = summary(expected), summary(results)
    assert error(other_output, output) < TOLERANCE
    assert abs(other_norm / norm - 1) < TOLERANCE
    after_step, other_after_step = (contents(f / "stepped")[0] for f in (source, tmp_path))
    for key, tensor in one[0].items():
        if tensor.is_floating_point():
            moved = (after_step[key] - tensor).norm()
            wrong = (other_after_step[key] - after_step[key]).norm()
            assert moved > 0, key
            assert wrong < STEP_TOLERANCE * moved, key
    _check_replicas(results)


def _steps(common):
    """The step of every parameter group of every optimizer, wherever Megatron keeps it."""
    if isinstance(common, dict):
        own = [int(common[name]) for name in ("step", "common_step") if name in common]
        return own + [step for value in common.values() for step in _steps(value)]
    return [s for value in common for s in _steps(value)] if isinstance(common, list) else []


def _check_replicas(results):
    """Every rank that holds a shared matrix holds the same."""
    seen = {}
    for _, _, _, shared in results:
        for name, weight in shared.items():
            assert torch.equal(seen.setdefault(name, weight), weight), name


def test_shared_matrices_are_stored_once(trained):
    """Four ranks, two and two of which hold the same: one box of the file for each layer."""
    source, _ = trained((4, {TP: 2}), False, True)
    folder = TorchDistFolder(source / "state", FileChecks(source / "state", {}))
    for projection, variant in KHA.variants.items():
        key = f"decoder.layers.self_attention.knock_{projection}.weight"
        for prefix in ("", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq."):
            stored = folder.tensors[prefix + key]
            assert stored.shape == (DENSE["num_layers"], len(MATRICES[variant]), 6, 6)
            starts = sorted(chunk.offsets for chunk in stored.chunks)
            assert starts == [(layer, 0, 0, 0) for layer in range(DENSE["num_layers"])]


def test_expert_weights_load_on_one_rank(run, trained, tmp_path):
    """Megatron has a separate optimizer for experts with expert parallelism, and none without.

    Its state does not go from one to the other, which is refused; the weights do.
    """
    source, expected = trained((2, {EP: 2}), True, False)
    with pytest.raises(RankError, match="Could not find parameter group"):
        run(load_and_go_on, 1, str(source), str(tmp_path), {}, EXPERTS, False)
    output, _ = summary(run(load_weights, 1, str(source), {}, EXPERTS))
    assert error(output, summary(expected)[0]) < TOLERANCE


def test_upcycling_under_another_layout(run, tmp_path):
    """The matrices that the checkpoint lacks stay the identity, and are in the next one."""
    expected = run(train_and_save, 2, str(tmp_path), {TP: 2}, DENSE, False, KHAConfig())
    with pytest.raises(RankError, match=r"Unexpected keys .*self_attention\.knock_value\.weight"):
        run(load_weights, 2, str(tmp_path), {PP: 2}, DENSE)
    output, _ = summary(run(upcycle, 2, str(tmp_path), {PP: 2}, DENSE))
    assert error(output, summary(expected)[0]) < TOLERANCE
    before, after = (contents(tmp_path / name)[0] for name in ("state", "upcycled"))
    weights = {key for key in before if not key.startswith("optimizer.")}
    added = after.keys() - weights
    assert added == {f"decoder.layers.self_attention.knock_{p}.weight" for p in PROJECTIONS}
    assert torch.equal(
        after["decoder.layers.self_attention.knock_key.weight"],
        torch.eye(6).expand(DENSE["num_layers"], 1, 6, 6),
    )
    assert all(torch.equal(after[key], before[key]) for key in weights)
