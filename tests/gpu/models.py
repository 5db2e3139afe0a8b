"""Build one model from Megatron's modules and from Transformer Engine's, on one rank.

Transformer Engine needs sizes that are multiples of 16, and of 32 for tokens. The batch is odd.
"""

import os
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel

from kha_megatron.heads.config import HeadsConfig
from kha_megatron.heads.kernels import fused
from kha_megatron.mcore import cpu
from tests.distributed import models

VOCAB = 128
SEQUENCE = 64
BATCH = 3

EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 64,
    # every expert for every token: two dtypes would choose differently between near equals
    "moe_router_topk": 4,
    "moe_router_score_function": "sigmoid",
    "moe_router_load_balancing_type": "none",
    "moe_router_dtype": "fp32",
    "moe_token_dispatcher_type": "alltoall",
    "moe_aux_loss_coeff": 0.0,
}


def build(
    kha: HeadsConfig,
    impl: str,
    dtype: torch.dtype,
    *,
    moe: bool,
    head: bool = True,
    **changes: Any,
) -> GPTModel:
    """Build a GPTModel of ``impl`` on this rank's device; ``head`` adds output layer and loss."""
    settings = {
        "num_layers": 2,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 64,
        "ffn_hidden_size": 256,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        "transformer_impl": impl,
        "use_cpu_initialization": cpu.is_installed(),
    }
    if moe:
        settings |= EXPERTS
        if impl == "transformer_engine":
            settings["moe_grouped_gemm"] = True
    model = models.gpt_model(
        models.transformer_config(**settings | changes),
        kha,
        vocab_size=VOCAB,
        max_sequence_length=SEQUENCE,
        post_process=head,
    )
    return model.to(device())


def device() -> torch.device:
    return torch.device("cpu" if cpu.is_installed() else f"cuda:{torch.cuda.current_device()}")


def local_name(name: str) -> str:
    """Return the local form's name for a parameter of the Transformer Engine form."""
    name = name.replace("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight")
    name = name.replace("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")
    name = re.sub(r"linear_(q|kv)_up_proj\.layer_norm_weight", r"\1_layernorm.weight", name)
    grouped = r"experts\.(linear_fc[12])\.weight(\d+)$"
    return re.sub(grouped, r"experts.local_experts.\2.\1.weight", name)


@torch.no_grad()
def copy_weights(source: torch.nn.Module, target: torch.nn.Module) -> None:
    """Copy the parameters of ``source`` to ``target`` by their local names."""
    values = {local_name(name): p for name, p in source.named_parameters()}
    parameters = {local_name(name): p for name, p in target.named_parameters()}
    assert values.keys() == parameters.keys(), values.keys() ^ parameters.keys()
    for name, parameter in parameters.items():
        parameter.copy_(values[name])


def batch(seed: int = 5) -> list[torch.Tensor]:
    """Return token ids and position ids ``[b, s]``, and the causal mask ``[1, 1, s, s]``."""
    return [x.to(device()) for x in models.batch(seed, (BATCH, SEQUENCE), VOCAB)]


def outcome(model: GPTModel) -> dict[str, torch.Tensor]:
    """Return the logits and all gradients of the loss in float32, by the local names."""
    tokens, positions, mask = batch()
    model.zero_grad(set_to_none=True)
    with torch.no_grad():
        logits = model(tokens, positions, mask)
    losses = model(tokens, positions, mask, labels=tokens.roll(-1, 1))
    losses.float().sum().backward()  # not their mean, whose gradients float16 would cut off
    tensors = {"logits": logits.float().cpu()}
    for name, parameter in model.named_parameters():
        tensors[f"d {local_name(name)}"] = parameter.grad.float().cpu()
    return tensors


def accumulated(model: GPTModel, microbatches: int = 3) -> dict[str, torch.Tensor]:
    """Return ``main_grad`` of Megatron's data parallelism after several microbatches.

    Gradients of a fixed random projection of the model's output, in float32, by the local names.
    """
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    wrapped = DistributedDataParallel(model.config, settings, model)
    wrapped.zero_grad_buffer()
    for seed in range(microbatches):
        is_last = seed == microbatches - 1
        with nullcontext() if is_last else wrapped.no_sync():
            tokens, positions, mask = batch(seed)
            output = wrapped(tokens, positions, mask).float()
            generator = torch.Generator().manual_seed(seed)
            direction = torch.randn(output.shape, generator=generator)
            (output * direction.to(output.device)).sum().backward()
    wrapped.finish_grad_sync()
    gradients = {}
    for name, parameter in model.named_parameters():
        gradients[local_name(name)] = parameter.main_grad.float().cpu().clone()
    return gradients


class Errors(NamedTuple):
    """Relative errors of two models, by the local names."""

    ours: dict[str, float]
    plain: dict[str, float]
    """Of local layers in the dtype of ours, in torch."""

    def beyond(self, floor: float, times: float = 2) -> dict[str, tuple[float, float]]:
        """Return our errors that exceed ``floor`` and ``times`` the plain ones."""
        too_large = {}
        for name, error in self.ours.items():
            plain = self.plain[name]
            if not error <= max(times * plain, floor):
                too_large[name] = (error, plain)
        return too_large


def errors(
    kha: HeadsConfig,
    impl: str,
    dtype: torch.dtype,
    look: Callable[[GPTModel], dict[str, torch.Tensor]],
    *,
    moe: bool = False,
    head: bool = True,
    spoil: Callable[[GPTModel], None] | None = None,
    sizes: Mapping[str, Any] = MappingProxyType({}),
    **changes: Any,
) -> Errors:
    """Return the relative errors, of norms, of the tensors that ``look`` returns.

    Ours is a model of ``impl``, with the kernels if they run here. The reference is Megatron's
    local layers in float32 with the same weights, without kernels. The plain model has local layers
    in ``dtype``, which show the effect of rounding. ``sizes`` configures all three, and ``changes``
    only our model, which ``spoil`` may change before it runs.
    """
    models.initialize()
    ours = build(kha, impl, dtype, moe=moe, head=head, **sizes, **changes)
    plain = build(kha, "local", dtype, moe=moe, head=head, **sizes)
    exact = build(kha, "local", torch.float32, moe=moe, head=head, **sizes)
    copy_weights(ours, plain)
    copy_weights(ours, exact)
    with mock.patch.dict(os.environ, {fused.KERNELS_VARIABLE: "torch"}):
        exact_tensors = look(exact)
        plain_tensors = look(plain)
    if spoil is not None:
        spoil(ours)
    x = torch.empty(1, ours.config.kv_channels, dtype=dtype, device=device())
    supported = fused.unsupported_reason(x, x.expand(1, -1, -1)) is None
    kernels = "triton" if supported else "torch"
    with mock.patch.dict(os.environ, {fused.KERNELS_VARIABLE: kernels}):
        our_tensors = look(ours)
    for tensors in (our_tensors, plain_tensors):
        assert bool(kha.variants) == any("knock_" in name for name in tensors)
    return Errors(
        _relative(our_tensors, exact_tensors),
        _relative(plain_tensors, exact_tensors),
    )


def _relative(
    actual: dict[str, torch.Tensor],
    expected: dict[str, torch.Tensor],
) -> dict[str, float]:
    assert actual.keys() == expected.keys(), actual.keys() ^ expected.keys()
    relative = {}
    for name, value in actual.items():
        difference = value - expected[name]
        relative[name] = (difference.norm() / expected[name].norm()).item()
    return relative
