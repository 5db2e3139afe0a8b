"""Cases that are compared with an unsharded run: one per claim, and others for `make test-all`."""

from dataclasses import replace

from kha_megatron.heads import CollaborativeHeads, Gate, Knock, MixtureOfHeads, TalkingHeads
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.heads.knock import MATRICES, PROJECTIONS
from tests.distributed.parallelism import Case, Layout

MIXED = HeadsConfig(Knock(query="linear", key="gate", value="mlp"))
RANDOM = MIXED.updated(init="random")
"""Each layer has different matrices, so that a layer in the wrong place is found."""
EVERY_PLACE = tuple(HeadsConfig(Knock(**{p: v})) for v in MATRICES for p in PROJECTIONS)

LINEAR = HeadsConfig.from_preset("kha_linear")
FOLDED = (
    LINEAR,
    HeadsConfig(Knock(query="linear", key="gate", value="linear"), Gate(output="head")),
)
"""Every matrix is linear, or other mechanisms are next to them."""
MLA = LINEAR
"""All that latent attention supports."""
GLA = LINEAR.updated(attention="gla")
GTA = HeadsConfig(Knock(query="gate", value="mlp"), attention="gta")
LATENT = {"multi_latent_attention": True}
CENTERED = {"layernorm_zero_centered_gamma": True}
TIED = {"kv_channels": 8}

TALKING = HeadsConfig(Knock(value="mlp"), TalkingHeads())
SHARED = HeadsConfig(Knock(value="mlp"), CollaborativeHeads(dim=14), Gate(output="head"))
MIXING = (TALKING, SHARED)
WIDER = {"kv_channels": 12}
"""Enough rows for four ranks to share one value head."""

STOCK_GATE = HeadsConfig(Knock(value="mlp"), Gate(output="element"))
"""Also Megatron's gate, which its flag makes it apply itself."""
GATES = HeadsConfig(
    Knock(query="linear"),
    Gate(output="head", value="element", key="shared", query="element", dense="element"),
)
"""Rows of every kind, and both gradient rules of projections of the input."""
GATED_MLA = MLA.updated(gate=Gate(output="element"))

MOH = HeadsConfig(MixtureOfHeads(shared=3, active=[2, 3, 1, 2], balance=5.0))
"""Each layer has a different number of heads. At the paper's balance weight of 0.01, a loss that
counts twice changes no gradient by more than 1e-4."""
SPLIT = RANDOM.updated(moh=MixtureOfHeads(shared=3, active=[2, 3, 1], balance=5.0))
QUANTIZED = LINEAR.updated(
    moh=MixtureOfHeads(shared=3, active=2, router="query_norm", quantized=True, balance=5.0)
)

ZERO = {"use_distributed_optimizer": True}
OVERLAP = {"overlap_grad_reduce": True}
OVERLAP_ALL = ZERO | OVERLAP | {"overlap_param_gather": True}
FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
SELECTIVE = {"recompute_granularity": "selective"}
ALLTOALL = {"moe_token_dispatcher_type": "alltoall"}
ALLGATHER = {"moe_token_dispatcher_type": "allgather"}


def case(*, khas=(MIXED,), **fields):
    names = Layout.__dataclass_fields__
    layout = Layout(**{name: value for name, value in fields.items() if name in names})
    rest = {name: value for name, value in fields.items() if name not in names}
    return Case(layout=layout, khas=khas, **rest)


def _every(rows, **common):
    return [case(**common | fields) for fields in rows]


FAST = [
    case(tp=2),
    case(tp=2, sp=True, groups=1),
    case(tp=2, sp=True, dp=2, ep=2, etp=2, model="moe"),
]
"""Cases of `make test-fast`."""
ONE_PER_CLAIM = [
    *FAST,
    case(gpt=True, khas=(RANDOM,), tp=2, sp=True, pp=2, vpp=2, groups=1, layers=4),
    case(gpt=True, tp=2, sp=True, dp=2, ep=2, etp=2, model="moe"),
    case(khas=(SPLIT,), pp=2, layers=3),  # the stages split a pair of attention and MLP
    case(mtp=2, tp=2, sp=True, savings=FULL),
    case(mtp=1, tp=2, sp=True, pp=2, model="moe"),
    case(tp=2, sp=True, groups=1, config=CENTERED),
    case(tp=4, groups=2),
    case(dp=2, ddp=OVERLAP_ALL),
    case(dp=2, fsdp="torch"),
    case(khas=(RANDOM,), tp=2, sp=True, pp=2, vpp=2, groups=1, layers=4),
    case(tp=2, sp=True, cp=2, groups=1),
    case(tp=2, sp=True, groups=2, savings=FULL),
    case(khas=(LINEAR,), tp=2, sp=True, dp=2, ddp=OVERLAP_ALL, groups=1),
    case(khas=FOLDED, fold=True, dp=2, ddp=OVERLAP_ALL),
    case(khas=(LINEAR,), fold=True, tp=2, sp=True, groups=1, savings=FULL),
    case(khas=(LINEAR,), fold=True, pp=2, dp=2, ddp=OVERLAP_ALL),
    case(khas=(MLA, GLA, GATED_MLA), tp=2, config=LATENT),
    case(khas=(GTA,), tp=2, config=TIED),
    case(khas=(GTA,), tp=2, sp=True, config=TIED),
    case(khas=MIXING, tp=4, sp=True, groups=2, config=WIDER),
    case(bf16=True, tp=2, sp=True, groups=2),
    case(khas=(STOCK_GATE, GATES), tp=2, sp=True, groups=1),
    case(khas=(GATES,), tp=2, cp=2),
    case(khas=(MOH,), layers=4, tp=2, sp=True, pp=2, vpp=2, groups=1),
    case(khas=(MOH, QUANTIZED), layers=4, cp=2, per_token_loss=True),
]

_GROUPS = [
    case(tp=tp, sp=sp, groups=groups, khas=(MIXED, *EVERY_PLACE))
    for tp, sp in ((2, False), (2, True), (4, False), (4, True))
    for groups in (8, 4, 2, 1)  # more key/value heads than ranks, as many, and fewer
]
_PAIRS = _every(
    (
        {"tp": 2, "groups": 2, "config": {"qk_layernorm": False}},
        {"tp": 4, "sp": True, "groups": 2, "config": {"qk_layernorm": False}},
        {"dp": 2},
        {"dp": 2, "per_token_loss": True},
        {"dp": 2, "ddp": ZERO},
        {"dp": 2, "ddp": OVERLAP},
        {"tp": 2, "sp": True, "dp": 2, "ddp": OVERLAP_ALL, "per_token_loss": True},
        {"cp": 2},
        {"cp": 2, "pp": 2},
        {"cp": 2, "per_token_loss": True},
        {"savings": SELECTIVE},
        {"pp": 2, "savings": FULL},
        {"tp": 2, "sp": True, "groups": 2, "savings": SELECTIVE},
        {"tp": 2, "groups": 1, "savings": FULL | {"recompute_method": "block"}},
        {"bf16": True, "dp": 2, "ddp": OVERLAP_ALL},
        {"bf16": True, "pp": 2, "tied": True},
        {"bf16": True, "pp": 2, "vpp": 2, "layers": 4},
        {"bf16": True, "cp": 2},
        {"bf16": True, "dp": 2, "fsdp": "torch"},
        {"bf16": True, "tp": 2, "sp": True, "ep": 2, "model": "moe"},
        {"khas": (RANDOM,), "pp": 2, "tied": True},
        {"khas": (RANDOM,), "pp": 2, "vpp": 2, "layers": 4},
        {"khas": (RANDOM,), "pp": 4, "layers": 4},
        {"khas": (RANDOM,), "pp": 2, "model": "moe"},
        {"khas": (RANDOM,), "pp": 2, "dp": 2, "tied": True, "ddp": OVERLAP_ALL},
    )
)
_FOLDED = _every(
    (
        {"fold": True, "dp": 2},
        {"fold": True, "dp": 2, "ddp": ZERO},
        {"fold": True, "dp": 2, "ddp": OVERLAP},
        {"fold": True, "dp": 2, "ddp": OVERLAP_ALL, "gpt": True},
        {"fold": True, "tp": 2, "dp": 2, "ddp": OVERLAP_ALL, "per_token_loss": True},
        {"fold": True, "tp": 2, "sp": True},
        {"fold": True, "pp": 2, "savings": FULL},
        {"fold": True, "pp": 2, "dp": 2, "tied": True, "ddp": OVERLAP_ALL},
        {"fold": True, "pp": 2, "vpp": 2, "layers": 4},
        {"fold": True, "tp": 2, "sp": True, "pp": 2, "vpp": 2, "layers": 4, "ddp": OVERLAP_ALL},
        {"fold": True, "pp": 4},  # two stages have no attention
        {"fold": True, "cp": 2, "dp": 2, "ddp": OVERLAP},
        {"fold": True, "mtp": 2, "tp": 2, "sp": True},
        {"fold": True, "tp": 2, "sp": True, "dp": 2, "ep": 2, "model": "moe", "ddp": OVERLAP_ALL},
        {"fold": True, "tp": 2, "sp": True, "savings": SELECTIVE},
    ),
    khas=FOLDED,
)
_EXPERTS = _every(
    (
        {"dp": 2, "ep": 2, "savings": ALLTOALL},
        {"tp": 2, "sp": True, "ep": 2, "savings": ALLGATHER},
        {"tp": 2, "sp": True, "etp": 2, "savings": ALLTOALL},
        {"tp": 2, "sp": True, "dp": 2, "ep": 2, "ddp": OVERLAP_ALL},
        {"pp": 2, "dp": 2, "ep": 2, "groups": 1, "ddp": ZERO},
        {"cp": 2, "ep": 2},
    ),
    model="moe",
)
_MECHANISMS = [
    replace(row, layers=4 if MOH in khas or row.layout.vpp else 2, khas=khas, config=config)
    for khas, config in (
        ((MLA, GLA, GATED_MLA), LATENT),
        ((GTA,), TIED),
        (MIXING, WIDER),
        ((STOCK_GATE, GATES), {}),
        ((MOH, QUANTIZED), {}),
    )
    for row in _every(
        (
            {"tp": 2},
            {"tp": 2, "sp": True},
            {"tp": 4, "sp": True},
            {"cp": 2},
            {"pp": 2, "vpp": 2},
            {"dp": 2, "ddp": ZERO},
            {"dp": 2, "fsdp": "torch"},
            {"dp": 2, "per_token_loss": True},
            {"tp": 2, "dp": 2, "ddp": OVERLAP_ALL, "per_token_loss": True},
            {"tp": 2, "sp": True, "savings": FULL},
            {"tp": 2, "sp": True, "savings": SELECTIVE},
            {"tp": 2, "sp": True, "ep": 2, "model": "moe"},
        )
    )
]
_OTHERS = [
    *_every(
        ({"tp": 2, "config": LATENT | {"qk_layernorm": False}}, {"tp": 4, "config": LATENT}),
        khas=(MLA, GLA),
    ),
    *_every(
        (
            {"khas": (MLA, GLA), "config": LATENT},
            {"khas": MIXING, "config": WIDER},
            {"khas": (GTA,), "config": TIED},
            {"khas": (STOCK_GATE, GATES)},
        ),
        bf16=True,
        tp=2,
    ),
    *(case(khas=(GTA,), tp=4, sp=True, groups=groups, config=TIED) for groups in (8, 2, 1)),
    case(khas=(GTA.updated(query="linear", value="linear"),), tp=4, config=TIED),
    *(case(khas=MIXING, tp=4, groups=groups, config=WIDER) for groups in (8, 1)),
    *_every(
        ({"tp": 2}, {"tp": 4, "groups": 2}, {"pp": 2}, {"savings": SELECTIVE}),
        khas=(STOCK_GATE,),
        config={"attention_output_gate": True},
    ),
]
ALL_OTHERS = [
    row
    for row in (*_GROUPS, *_PAIRS, *_FOLDED, *_EXPERTS, *_MECHANISMS, *_OTHERS)
    if str(row) not in map(str, ONE_PER_CLAIM)
]
