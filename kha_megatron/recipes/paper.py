"""The paper's models (sections 4.1 and 4.4, Table 5) as recipes.

Sizes are the paper's. What it does not print is Megatron's default, or follows from its parameter
counts: tied embeddings, a vocabulary of 157,184, and the shape of the 6.1B model of the long run.
The parallel sizes are ours; the paper trained with FSDP.
"""

from kha_megatron.recipes.recipe import Recipe, Value

VOCAB_SIZE = 157184
"""Entries of the paper's tokenizer, as its parameter counts give them."""

_ATTENTION: dict[str, Value] = {
    "--num-attention-heads": 32,
    "--group-query-attention": True,
    "--num-query-groups": 4,
    "--kv-channels": 128,
    "--qk-layernorm": True,
    "--normalization": "RMSNorm",
    "--swiglu": True,
    "--disable-bias-linear": True,
    "--position-embedding-type": "rope",
    "--attention-dropout": 0.0,
    "--hidden-dropout": 0.0,
}

_OPTIMISATION: dict[str, Value] = {
    "--adam-beta1": 0.9,
    "--adam-beta2": 0.95,
    "--weight-decay": 0.1,
    "--clip-grad": 1.0,
    "--lr-decay-style": "cosine",
    "--lr-warmup-fraction": 0.05,
    "--micro-batch-size": 1,
    "--global-batch-size": 512,
    "--bf16": True,
    "--use-distributed-optimizer": True,
    "--overlap-grad-reduce": True,
    "--overlap-param-gather": True,
    "--eval-interval": 1000,
    "--eval-iters": 0,
    "--log-interval": 10,
    "--tensorboard-log-interval": 1,
    "--save-interval": 1000,
    "--ckpt-format": "torch_dist",
}

_EXPLORATION: dict[str, Value] = {  # 100B tokens in batches of 2.1M
    "--seq-length": 4096,
    "--max-position-embeddings": 4096,
    "--train-iters": 47684,
    "--lr": 7.5e-4,
    "--min-lr": 7.5e-5,
}

_MAIN_RUN: dict[str, Value] = {  # 1T tokens in batches of 4.2M
    "--seq-length": 8192,
    "--max-position-embeddings": 8192,
    "--train-iters": 238419,
    "--lr": 4.78e-4,
    "--min-lr": 4.78e-5,
}


def _sizes(layers: int, hidden: int, ffn: int) -> dict[str, Value]:
    return {"--num-layers": layers, "--hidden-size": hidden, "--ffn-hidden-size": ffn}


def _experts(total: int, active: int, ffn: int) -> dict[str, Value]:
    return {
        "--num-experts": total,
        "--moe-router-topk": active,
        "--moe-ffn-hidden-size": ffn,
        # balanced by a bias instead of an auxiliary loss
        "--moe-router-score-function": "sigmoid",
        "--moe-router-enable-expert-bias": True,
        "--moe-router-load-balancing-type": "none",
        "--moe-router-dtype": "fp32",
        "--moe-token-dispatcher-type": "alltoall",
        "--expert-model-parallel-size": 8,
    }


def _moe(
    name: str,
    layers: int,
    hidden: int,
    ffn: int,
    *,
    experts: tuple[int, int] = (64, 4),
    training: dict[str, Value] = _EXPLORATION,
) -> Recipe:
    total, active = experts
    sizes = _sizes(layers, hidden, ffn) | _ATTENTION | _experts(total, active, ffn)
    tokens = "1T" if training is _MAIN_RUN else "100B"
    return Recipe(
        name=name,
        description=f"the paper's MoE, {active} of {total} experts, KHA-MLP, {tokens} tokens",
        ranks=8,
        vocab_size=VOCAB_SIZE,
        megatron=sizes | training | _OPTIMISATION,
    )


def _dense(name: str, layers: int, hidden: int, ffn: int) -> Recipe:
    return Recipe(
        name=name,
        description="the paper's dense model, KHA-Linear, 100B tokens",
        ranks=8,
        vocab_size=VOCAB_SIZE,
        kha_preset="kha_linear",
        megatron=_sizes(layers, hidden, ffn) | _ATTENTION | _EXPLORATION | _OPTIMISATION,
    )


PAPER = (
    _moe("moe-a0.44b-2.3b", 12, 1152, 768),
    _moe("moe-a0.8b-6.6b", 18, 1536, 1152),
    _moe("moe-a1.6b-14.6b", 23, 2048, 1536),
    _dense("dense-0.6b", 24, 1024, 3072),
    _dense("dense-1.7b", 24, 2048, 6144),
    _dense("dense-3.9b", 36, 2560, 9728),
    _moe("moe-a1b-6.1b", 18, 2048, 384, experts=(128, 8), training=_MAIN_RUN),
)
