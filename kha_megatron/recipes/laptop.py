"""The paper's comparison at a size that two CPU cores train in an evening, a minute a run.

The shapes are the paper's (section 4.1) in small: four key/value heads, RMSNorm on queries and
keys, experts that a bias balances; and a dense model.
One rank each, so that ``kha-megatron compare`` trains as many side by side as there are cores.
``benchmarks/reproduction.md`` says how the learning rate was chosen.
"""

from typing import Any

from kha_megatron.model.run import Run
from kha_megatron.recipes.paper import ATTENTION
from kha_megatron.recipes.recipe import Recipe

_SHAPE: dict[str, Any] = ATTENTION | {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "group_query_attention": True,
    "num_query_groups": 4,
    "kv_channels": 16,
    "rotary_base": 10000,
    # half of 1/sqrt(hidden); from 0.02 hundreds of steps go into leaving the start, at moments that
    # chance decides, and pairs of runs scatter ten times as much
    "init_method_std": 0.06,
}
_EXPERTS: dict[str, Any] = {
    "ffn_hidden_size": 64,
    "num_experts": 8,
    "moe_ffn_hidden_size": 64,
    "moe_router_topk": 2,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": ("none",),
    "moe_router_dtype": "fp32",
    "moe_token_dispatcher_type": "alltoall",
}
_TRAINING: dict[str, Any] = {
    "tensor_model_parallel_size": 1,
    "seq_length": 128,
    "max_position_embeddings": 128,
    "micro_batch_size": 8,
    "global_batch_size": 8,
    "train_iters": 350,
    "lr": 4e-3,
    "min_lr": 4e-4,
    "lr_decay_style": "cosine",
    "lr_warmup_fraction": 0.05,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "weight_decay": 0.1,
    "clip_grad": 1.0,
    "seed": 1234,
    "split": "95,5,0",
    "num_workers": 0,
    "eval_interval": 1000,
    "eval_iters": 0,
    "log_interval": 10,
    "tensorboard_log_interval": 1,
    "save_interval": 1000,
    "ckpt_format": "torch_dist",
    "device": "cpu",
    "kha_preset": "kha_mlp",
}


def _recipe(name: str, what: str, feed_forward: dict[str, Any]) -> Recipe:
    return Recipe(
        name=f"laptop/{name}",
        description=f"{what}, 2 layers, 8 query and 4 KV heads, one CPU core",
        ranks=1,
        run=Run.of(vocab_size=512, **_SHAPE, **feed_forward, **_TRAINING),
        environment={"OMP_NUM_THREADS": "1"},
    )


LAPTOP = (
    _recipe("moe", "MoE of 8 experts, top 2", _EXPERTS),
    _recipe("dense", "dense model", {"ffn_hidden_size": 192}),
)
"""A mixture of experts and a dense model with as many active parameters."""
