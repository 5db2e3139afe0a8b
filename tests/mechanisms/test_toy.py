"""A mechanism that is added without a change of the package, and mistakes that its check finds."""

from pathlib import Path

import pytest
import torch

from kha_megatron.heads import CollaborativeHeads, Gate, MixtureOfHeads, TalkingHeads, registry
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.testing import check_mechanism
from tests.distributed.cases import FULL, case
from tests.distributed.parallelism import train
from tests.distributed.pieces import errors, quantities
from tests.hf.conftest import check_layer_against_oracle, make_config
from tests.mechanisms.formulas import attend, project
from tests.mechanisms.toy import Toy

TOY = Path(__file__).parent / "toy.py"


@pytest.fixture(autouse=True)
def toy_file(monkeypatch):
    """Register the toy in this process only for one test."""
    monkeypatch.setenv(registry.FILES_VARIABLE, str(TOY))


def test_toy_follows_all_rules():
    check_mechanism(Toy, strength=2.0)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("mechanism", "settings"),
    [
        (Gate, {"output": "head", "value": "element", "key": "shared", "dense": "element"}),
        (MixtureOfHeads, {"share": 0.75}),
        (MixtureOfHeads, {"share": 0.5, "router": "query_norm", "quantized": True}),
        (TalkingHeads, {}),
        (CollaborativeHeads, {"dim": 10}),
    ],
)
def test_mechanisms_of_this_package_follow_all_rules(mechanism, settings, forked_check):
    check_mechanism(mechanism, smooth=not settings.get("quantized"), **settings)


WHOLE = "Gradient of `{}` is declared `whole`, but differs between TP ranks: it is a sum over heads"
MISTAKES = {
    "sum over heads declared whole": (
        WHOLE.format("toy_scale"),
        (
            '"toy_scale", shape=(dim,), gradient="heads"',
            '"toy_scale", shape=(dim,), gradient="whole"',
        ),
    ),
    "scores used by each head declared whole": (
        WHOLE.format("toy_score"),
        ('hidden_size),\n                gradient="heads"', 'hidden_size),\n gradient="whole"'),
        ('(1 + tensors["toy_score"])', '(1 + tensors["toy_score"][..., None])'),
    ),
    "initial value from the random state": (
        "Initial value of `toy_mix` differs between ranks",
        ('initial=("ones",)', 'initial=(__import__("torch").nn.init.normal_,)'),
    ),
    "no TP split": (
        "TP split: the layer fails under TP 2 and 4 KV heads. Set `per_head` if `toy_mix`",
        ('hf="toy_mix",\n                per_head=True,', 'hf="toy_mix",'),
    ),
    "split along the wrong dimension": (
        "TP split of `toy_mix`: it is declared `per_head` with shape",
        ("shape=(sizes.kv_heads, dim)", "shape=(dim, sizes.kv_heads)"),
    ),
    "no export name": ("Export name of `toy_scale` is ''", (', hf="toy_scale"', ', hf=""')),
    "an initial value that changes the outputs": (
        "initial values change the outputs of a model",
        ('initial=("zeros",)', 'initial=("ones",)'),
    ),
    "tokens that depend on each other": (
        "KV cache: decoding under TP 1",
        ('weights["toy_mix"] * value', 'weights["toy_mix"] * value.cumsum(0)'),
    ),
    "later tokens during training": (
        "Future tokens: during training, the outputs of a token depend on later tokens",
        (
            'weights["toy_mix"] * value',
            'weights["toy_mix"] * (value.flip(0) if ranks.trains else value)',
        ),
    ),
    "other sequences during training": (
        "the outputs of a sequence depend on the other sequences of the microbatch",
        (
            'weights["toy_mix"] * value',
            'weights["toy_mix"] * (value.flip(1) if ranks.trains else value)',
        ),
    ),
    "a parameter without an effect": (
        "`toy_mix` has no effect on the outputs with QK-norm. Remove it, or return",
        ("self.strength * mixed", "0 * mixed"),
    ),
    "a scale that QK-norm cancels": (
        "`toy_mix` has no effect on the outputs with QK-norm. Remove it, or return",
        ('value = tensors["value"]', 'key = tensors["key"]'),
        (
            'mixed = (weights["toy_mix"] * value).tanh() * weights["toy_scale"]',
            'scale = (weights["toy_mix"] * weights["toy_scale"]).sum(-1, keepdim=True).tanh()',
        ),
        ('{"value": value + self.strength * mixed}', '{"key": key * (1 + scale / 2)}'),
    ),
    "a gradient that is cut": (
        "Gradient of `toy_mix` differs from finite differences",
        (".tanh() * weights", ".tanh().detach() * weights"),
    ),
}
"""The message, and pairs of right and wrong source."""
QUICK = [
    *("sum over heads declared whole", "initial value from the random state", "no export name"),
    *("later tokens during training", "a scale that QK-norm cancels"),
]


@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.whole) for n in MISTAKES],
)
def test_broken_rules_are_named(name, tmp_path, monkeypatch, forked_check):
    message, *changes = MISTAKES[name]
    source = TOY.read_text()
    for right, wrong in changes:
        assert right in source
        source = source.replace(right, wrong)
    (tmp_path / "broken.py").write_text(source)
    monkeypatch.setenv(registry.FILES_VARIABLE, str(tmp_path / "broken.py"))
    with pytest.raises(AssertionError) as error:
        check_mechanism(registry.mechanism_types()["toy"])
    assert message in str(error.value)


def test_layer_computes_the_formula():
    config = make_config(kha_toy={"strength": 2.0}, use_qk_norm=False)

    def formula(layer, hidden):
        query, key, value = project(layer, hidden, config.head_dim)
        mixed = torch.tanh(value * layer.toy_mix.weight) * layer.toy_scale.weight
        found = attend(query, key, value + 2 * mixed)
        found = found * (1 + hidden @ layer.toy_score.weight.T)[..., None]
        return found.flatten(2) @ layer.o_proj.weight.T

    check_layer_against_oracle(config, formula)


def train_with_toy(options):
    """Run a case on a rank. The class of a file cannot be sent to another process."""
    registry.use_files([TOY])
    return train(case(**options, khas=(HeadsConfig.from_preset("toy_strong"),)))


def twin_with_toy(options):
    registry.use_files([TOY])
    return train(case(**options, khas=(HeadsConfig.from_preset("toy_strong"),)).twin())


LAYOUTS = [
    {"tp": 2, "sp": True, "savings": FULL},
    pytest.param({"tp": 2, "sp": True, "pp": 2}, marks=pytest.mark.whole),
    {"ep": 2, "dp": 2, "model": "moe"},
]


@pytest.mark.parametrize("options", LAYOUTS, ids=str)
def test_training_equals_the_unsharded_run(ranks, options):
    layout = case(**options).layout
    want = quantities(ranks(twin_with_toy, 1, options)[0])
    results = ranks(train_with_toy, layout.world, options)
    found = errors(quantities([result for (result,) in results]), want, 2**-23)
    assert not {name: e for name, e in found.items() if not e <= 1e-5}
