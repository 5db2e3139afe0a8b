"""Rows of the table for optimisation, files and head mechanisms, with Megatron's defaults."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self

from kha_megatron.config import KHAConfig
from kha_megatron.model.fields import flag, read

_option = partial(flag, attribute=None, most=2**63 - 1)


@dataclass(frozen=True, kw_only=True)
class Training:
    """Optimisation, precision, reports and checkpoints."""

    train_iters: int | None = _option("--train-iters", None)
    train_samples: int | None = _option("--train-samples", None)
    lr: float | None = _option("--lr", None)
    min_lr: float = _option("--min-lr", 0.0)
    lr_decay_style: str = _option("--lr-decay-style", "linear")
    lr_warmup_fraction: float | None = _option("--lr-warmup-fraction", None)
    lr_warmup_iters: int = _option("--lr-warmup-iters", 0, least=0)
    lr_warmup_init: float = _option("--lr-warmup-init", 0.0)
    optimizer: str = _option("--optimizer", "adam")
    muon_split_qkv: bool = _option("--muon-no-split-qkv", True, argument="muon_split_qkv")
    adam_beta1: float = _option("--adam-beta1", 0.9)
    adam_beta2: float = _option("--adam-beta2", 0.999)
    weight_decay: float = _option("--weight-decay", 0.01)
    clip_grad: float = _option("--clip-grad", 1.0)
    seed: int = _option("--seed", 1234, least=None)
    bf16: bool = _option("--bf16", False)
    fp16: bool = _option("--fp16", False)
    use_distributed_optimizer: bool = _option("--use-distributed-optimizer", False)
    use_torch_fsdp2: bool = _option("--use-torch-fsdp2", False)
    use_megatron_fsdp: bool = _option("--use-megatron-fsdp", False)
    overlap_grad_reduce: bool = _option("--overlap-grad-reduce", False)
    overlap_param_gather: bool = _option("--overlap-param-gather", False)
    gradient_accumulation_fusion: bool = _option(
        "--no-gradient-accumulation-fusion", True, argument="gradient_accumulation_fusion"
    )
    recompute_granularity: Literal["selective", "full"] | None = _option(
        "--recompute-granularity", None
    )
    decrease_batch_size_if_needed: bool = _option("--decrease-batch-size-if-needed", False)
    split: str | None = _option("--split", None)
    num_workers: int = _option("--num-workers", 2, least=0)
    eval_interval: int = _option("--eval-interval", 1000)
    eval_iters: int = _option("--eval-iters", 100, least=0)
    log_interval: int = _option("--log-interval", 100)
    log_timers_to_tensorboard: bool = _option("--log-timers-to-tensorboard", False)
    tensorboard_log_interval: int = _option("--tensorboard-log-interval", 1)
    save_interval: int | None = _option("--save-interval", None)
    ckpt_format: str = _option("--ckpt-format", "torch_dist")
    exit_duration_in_mins: int | None = _option("--exit-duration-in-mins", None)
    use_checkpoint_args: bool = _option("--use-checkpoint-args", False)
    heterogeneous_layers_config_path: str | None = _option(
        "--heterogeneous-layers-config-path", None
    )
    heterogeneous_layers_config_encoded_json: str | None = _option(
        "--heterogeneous-layers-config-encoded-json", None
    )
    device: str = _option("--device", "cuda")
    kha_upcycle: bool = _option("--kha-upcycle", False)
    kha_perturb_embedding: float = _option("--kha-perturb-embedding", 0.0)

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """Build from Megatron's arguments by name, all or only some."""
        return cls(**read(cls, arguments))


@dataclass(frozen=True, kw_only=True)
class Files:
    """Files that a run reads and writes."""

    data_path: tuple[str, ...] | None = _option("--data-path", None)
    train_data_path: tuple[str, ...] | None = _option("--train-data-path", None)
    valid_data_path: tuple[str, ...] | None = _option("--valid-data-path", None)
    test_data_path: tuple[str, ...] | None = _option("--test-data-path", None)
    data_args_path: str | None = _option("--data-args-path", None)
    per_split_data_args_path: str | None = _option("--per-split-data-args-path", None)
    mock_data: bool = _option("--mock-data", False)
    tokenizer_type: str | None = _option("--tokenizer-type", None)
    tokenizer_model: str | None = _option("--tokenizer-model", None)
    save: str | None = _option("--save", None)
    load: str | None = _option("--load", None)
    tensorboard_dir: str | None = _option("--tensorboard-dir", None)

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """Build from Megatron's arguments by name, all or only some."""
        return cls(**read(cls, arguments))


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Arguments of the head mechanisms, which ``Run.kha`` parses."""

    kha_preset: str | None = _option("--kha-preset", None)
    kha_query: str | None = _option("--kha-query", None)
    kha_key: str | None = _option("--kha-key", None)
    kha_value: str | None = _option("--kha-value", None)
    kha_init: str = _option("--kha-init", KHAConfig.init)
    kha_init_seed: int = _option("--kha-init-seed", KHAConfig.init_seed, least=None)
    kha_fold: str = _option("--kha-fold", KHAConfig.fold)
    kha_heads: tuple[str, ...] | None = _option("--heads", None, argument="kha_heads")
