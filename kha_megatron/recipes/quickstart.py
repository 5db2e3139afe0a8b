"""The first run of a new user: a small mixture of experts that learns on a laptop's CPU."""

from kha_megatron.recipes.recipe import Recipe

QUICKSTART = Recipe(
    name="quickstart",
    description="1.8M-parameter MoE with KHA-MLP, tensor parallel over two CPU ranks",
    ranks=2,
    vocab_size=4096,
    device="cpu",
    kha_preset="kha_mlp",
    megatron={
        # model: the paper's shape (section 4.1) in small
        "--num-layers": 4,
        "--hidden-size": 128,
        "--ffn-hidden-size": 128,
        "--num-attention-heads": 4,
        "--group-query-attention": True,
        "--num-query-groups": 2,
        "--kv-channels": 32,
        "--qk-layernorm": True,
        "--normalization": "RMSNorm",
        "--norm-epsilon": 1e-6,
        "--swiglu": True,
        "--disable-bias-linear": True,
        "--position-embedding-type": "rope",
        "--rotary-base": 10000,
        "--attention-dropout": 0.0,
        "--hidden-dropout": 0.0,
        "--init-method-std": 0.05,  # half of 1/sqrt(hidden): short runs learn faster from it
        # experts, balanced by a bias instead of an auxiliary loss
        "--num-experts": 8,
        "--moe-ffn-hidden-size": 128,
        "--moe-router-topk": 2,
        "--moe-router-score-function": "sigmoid",
        "--moe-router-enable-expert-bias": True,
        "--moe-router-load-balancing-type": "none",
        "--moe-router-dtype": "fp32",
        "--moe-token-dispatcher-type": "alltoall",
        # layout
        "--tensor-model-parallel-size": 2,
        "--sequence-parallel": True,  # Megatron asks for it with experts and tensor parallelism
        "--expert-model-parallel-size": 2,
        "--expert-tensor-parallel-size": 1,
        # optimisation: the paper's, but for the learning rate and the lengths
        "--seq-length": 256,
        "--max-position-embeddings": 256,
        "--micro-batch-size": 16,
        "--global-batch-size": 16,
        "--train-iters": 350,
        "--lr": 8e-3,
        "--min-lr": 8e-4,
        "--lr-decay-style": "cosine",
        "--lr-warmup-fraction": 0.05,
        "--adam-beta1": 0.9,
        "--adam-beta2": 0.95,
        "--weight-decay": 0.1,
        "--clip-grad": 1.0,
        "--seed": 1234,
        # data, reports, checkpoints
        "--split": "99,1,0",
        "--num-workers": 0,
        "--eval-interval": 1000,
        "--eval-iters": 0,
        "--log-interval": 10,
        "--tensorboard-log-interval": 1,
        "--save-interval": 1000,
        "--ckpt-format": "torch_dist",
    },
    environment={
        "OMP_NUM_THREADS": "1",  # two ranks share the cores; more threads would fight over them
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron's own check with tensor parallelism
    },
)
