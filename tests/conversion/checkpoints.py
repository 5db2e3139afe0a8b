"""Save Megatron checkpoints on the ranks of ``tests.distributed``."""

import queue
import zlib
from argparse import ArgumentParser, Namespace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kha_megatron.heads.config import HeadsConfig

ITERATION = 7
VOCAB = 51
"""Entries of the tokenizer. ``tests.distributed.models.VOCAB`` is padded to a multiple of 8."""

Parameters = dict[str, np.ndarray]


def tokens() -> torch.Tensor:
    """Return token ids ``[2, 11]``."""
    return torch.randint(0, VOCAB, (2, 11), generator=torch.Generator().manual_seed(3))


def save_gpt(*args: Any) -> Parameters:
    """Call :func:`save_and_run` without a run; return the parameters and buffers in float32."""
    return save_and_run(*args, run=False)[0]


def save_and_run(
    folder: str,
    kha: HeadsConfig | None,
    layout: dict[str, int],
    config: dict[str, Any],
    args: dict[str, Any],
    *,
    run: bool = True,
    steps: int = 0,
) -> tuple[Parameters, np.ndarray | None]:
    """Save a GPTModel or HybridModel. Compute its logits ``[2, 11, padded vocabulary]``.

    Args:
        folder: The ``--save`` directory.
        kha: Head mechanisms. None saves no ``kha_*`` arguments.
        layout: Parallel sizes.
        config: Overrides of ``models.transformer_config``.
        args: Overrides of the saved arguments.
        run: Compute the logits.
        steps: Train the model for so many steps, and also compute the logits of MTP layers.

    Returns:
        The parameters and buffers of this rank, and the logits; None on earlier pipeline stages.
    """
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.models.gpt import gpt_layer_specs as specs

    from tests.distributed import models

    # Megatron would start a manager process for this queue, which a daemonic rank may not do
    filesystem_async._results_queue = queue.Queue()
    models.initialize(**layout)
    transformer = models.transformer_config(**layout, **config)
    saved = _arguments(transformer, kha, args)
    pattern = args.get("hybrid_layer_pattern")
    build = partial(models.hybrid_model, pattern=pattern) if pattern else models.gpt_model
    if transformer.mtp_num_layers and not pattern:
        spec = specs.get_gpt_decoder_block_spec(transformer, use_transformer_engine=False)
        mtp = specs.get_gpt_mtp_block_spec(transformer, spec, use_transformer_engine=False)
        build = partial(build, mtp_block_spec=mtp)
    model = build(
        transformer,
        kha or HeadsConfig(),
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=bool(steps),  # Megatron only trains with parallel outputs
        share_embeddings_and_output_weights=not saved["untie_embeddings_and_output_weights"],
        rotary_base=saved["rotary_base"],
        rotary_percent=saved["rotary_percent"],
    ).eval()
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for parameter in model.parameters():  # as Megatron's Float16Module does
        parameter.data = parameter.data.to(transformer.params_dtype)
    _enliven(model)
    train(model, steps)
    compute = compute_predictions if steps else compute_logits
    logits = compute(model, tokens()) if run else None
    state = {
        "model": model.sharded_state_dict(),
        "optimizer": {
            "state": ShardedTensor.from_rank_offsets(
                "optimizer.state.exp_avg.decoder.final_layernorm.weight",
                torch.zeros(5),
                (0, rank, size),
            ),
            "chained": ShardedTensor.from_rank_offsets(
                "chained_1.optimizer.distributed.param", torch.zeros(5), (0, rank, size)
            ),
        },
        "rng_state": ShardedObject("rng_state", [np.arange(3)], (size,), (rank,)),
        "args": Namespace(**saved),
        "iteration": ITERATION,
        "checkpoint_version": 3.0,
    }
    path = Path(folder) / f"iter_{ITERATION:07d}"
    if rank == 0:
        path.mkdir(parents=True)
    torch.distributed.barrier()
    dist_checkpointing.save(state, str(path))
    if rank == 0:
        (Path(folder) / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))
    held = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().float().numpy().copy() for name, tensor in held}, logits


def _arguments(config: Any, kha: HeadsConfig | None, args: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that Megatron would save for a configuration."""
    from megatron.training.arguments import add_megatron_arguments

    from tests.distributed import models

    defaults = vars(add_megatron_arguments(ArgumentParser(allow_abbrev=False)).parse_args([]))
    same = {name: getattr(config, name) for name in defaults if hasattr(config, name)}
    renamed = {
        "swiglu": config.gated_linear_unit,
        "num_experts": config.num_moe_experts,
        "group_query_attention": config.num_query_groups != config.num_attention_heads,
        "position_embedding_type": "rope",
        "params_dtype": config.params_dtype,
        "bf16": config.params_dtype == torch.bfloat16,
        "cp_comm_type": defaults["cp_comm_type"],
        "max_position_embeddings": models.SEQUENCE,
        "seq_length": models.SEQUENCE,
        "padded_vocab_size": models.VOCAB,
        "make_vocab_size_divisible_by": 8 // config.tensor_model_parallel_size,
        "untie_embeddings_and_output_weights": True,
    }
    record = kha.to_entries() if kha else {}
    return defaults | same | renamed | record | args


@torch.no_grad()
def _enliven(model: torch.nn.Module) -> None:
    """Change all tensors, so that logits differ between tokens and a swap of tensors is noticed."""
    from megatron.core import parallel_state

    tied = model.share_embeddings_and_output_weights
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "knock_" in name or not tensor.is_floating_point() or "tokens_per_expert" in name:
            continue
        if tied and name == "output_layer.weight":
            name = "embedding.word_embeddings.weight"
        seed = zlib.crc32(name.encode())
        if ".experts." in name:
            seed += 8 * parallel_state.get_expert_model_parallel_rank()
            seed += parallel_state.get_expert_tensor_parallel_rank()
        elif getattr(tensor, "tensor_model_parallel", False):
            seed += parallel_state.get_tensor_model_parallel_rank()
        noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))
        scale = 0.3 if tensor.dim() < 2 else tensor.shape[-1] ** -0.5
        tensor += (scale * noise).to(tensor.dtype)


@torch.no_grad()
def compute_logits(model: torch.nn.Module, ids: torch.Tensor) -> np.ndarray | None:
    """Return the logits ``[B, S, padded vocabulary]`` of a pipeline; None on earlier stages."""
    from megatron.core import parallel_state

    batch, length = ids.shape
    if not model.pre_process:
        hidden = torch.empty(length, batch, model.config.hidden_size)
        torch.distributed.recv(hidden, parallel_state.get_pipeline_model_parallel_prev_rank())
        model.set_input_tensor(hidden)
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    output = model(ids, torch.arange(length).expand_as(ids), mask)
    if not model.post_process:
        torch.distributed.send(output, parallel_state.get_pipeline_model_parallel_next_rank())
        return None
    return output.float().numpy()


def train(model: torch.nn.Module, steps: int) -> None:
    """Train all parameters on :func:`tokens`, including those of multi-token prediction."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    MTPLossLoggingHelper.tracker.clear()  # its size depends on the number of layers
    ids = tokens()
    mask = torch.ones(len(ids[0]), len(ids[0]), dtype=torch.bool).triu(1)[None, None]
    optimizer = torch.optim.SGD(model.train().parameters(), lr=0.05)
    for _ in range(steps):
        losses = model(ids, torch.arange(len(ids[0])).expand_as(ids), mask, labels=ids.roll(-1))
        losses.mean().backward()
        trained = (p.grad.any() for name, p in model.mtp.named_parameters() if "expert" not in name)
        assert all(trained)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


@torch.no_grad()
def compute_predictions(model: torch.nn.Module, ids: torch.Tensor) -> np.ndarray:
    """Return the logits of the model and its MTP layers ``[1 + N, B, S, padded vocabulary]``."""
    found: list[torch.Tensor] = []
    hook = model.mtp.register_forward_hook(lambda *call: found.append(call[-1]))
    logits = compute_logits(model, ids)
    hook.remove()
    hidden = found[0].chunk(1 + model.config.mtp_num_layers)
    tied = model.share_embeddings_and_output_weights
    weight = model.shared_embedding_or_output_weight() if tied else None
    predicted = np.stack(
        [model.output_layer(h, weight=weight)[0].transpose(0, 1).float().numpy() for h in hidden]
    )
    assert np.array_equal(predicted[0], logits)
    return predicted


def check_back(save: Path, back: Path) -> None:
    """Check that a round trip keeps all bits, except the padding of groups in ``linear_qkv``.

    Norm weights may come back minus one, with an error of half an ulp.
    """
    from kha_megatron.checkpoint.megatron import MegatronCheckpoint
    from kha_megatron.conversion.sources import open_source

    before, after = (MegatronCheckpoint.open(folder) for folder in (save, back))
    layout = open_source(save).model.qkv
    is_centered = after.args["layernorm_zero_centered_gamma"]
    drops_mtp = not any(key.startswith("mtp.") for key in after.keys())  # noqa: SIM118
    for key in before.keys():  # noqa: SIM118
        if key.startswith("mtp.") and drops_mtp:
            continue
        one, other = before.tensor(key), after.tensor(key)
        if "linear_qkv.weight" in key:
            one = one.clone().unflatten(-2, (layout.groups, -1))
            one[..., layout.padding, :] = 0
            one = one.flatten(-3, -2)
        if is_centered and "norm" in key:
            torch.testing.assert_close(1 + other, one, rtol=0, atol=2**-24)
            continue
        assert torch.equal(one, other), key
