#!/usr/bin/env bash
# Megatron's own pretrain_hybrid.py with KHA-MLP, unpatched. Needs GPUs and a Megatron-LM 0.19 checkout:
#   MEGATRON=/path/to/Megatron-LM examples/pretrain_stock.sh
set -euo pipefail
: "${MEGATRON:?set MEGATRON to a Megatron-LM 0.19 checkout}"

# The last flag is needed without NVIDIA's apex, and the variable before Blackwell with TP or CP.
CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc-per-node "${GPUS:-8}" "$MEGATRON/pretrain_hybrid.py" \
  --spec kha_megatron.mcore.specs kha_mlp_hybrid --hybrid-layer-pattern "*-*-*-*-*-*-*-*-*-*-*-*-" \
  --tensor-model-parallel-size 2 --sequence-parallel \
  --hidden-size 1024 --ffn-hidden-size 3072 \
  --num-attention-heads 8 --group-query-attention --num-query-groups 4 --kv-channels 128 \
  --qk-layernorm --normalization RMSNorm --swiglu --disable-bias-linear \
  --position-embedding-type rope --seq-length 4096 --max-position-embeddings 4096 \
  --micro-batch-size 1 --global-batch-size 64 --train-iters 100 --lr 7.5e-4 --bf16 \
  --mock-data --tokenizer-type NullTokenizer --vocab-size 32000 --eval-interval 1000 \
  --no-gradient-accumulation-fusion "$@"

# What you should see, once, before the first iteration:
#   kha_megatron: using layer spec kha_mlp (value=mlp)
# Without this line, Megatron could not import the spec and trains plain attention.
#
# Use the spec kha_hybrid to read other settings from the environment, the same on all nodes (JSON or a file):
#   KHA_CONFIG='{"key": "linear", "value": "mlp", "init_seed": 5}'
# For pretrain_gpt.py, use the specs kha_mlp and kha, and --num-layers 12 instead of the pattern.
