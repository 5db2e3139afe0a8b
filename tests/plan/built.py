"""Models really built by Megatron for a layout, for the tests that check estimates against them.

Functions at the top level run on the workers of ``tests/distributed/launcher.py``.
"""

from typing import Any

from kha_megatron.heads import CollaborativeHeads, Gate, Knock
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.model.layout import Layout
from kha_megatron.model.megatron import model_from_config

MIXED = HeadsConfig(Knock(query="linear", key="gate", value="mlp"))
GATES = HeadsConfig(
    Knock(value="mlp"),
    Gate(output="head", value="element", key="element", query="shared", dense="element"),
)
OTHERS = (
    HeadsConfig.from_preset("kha_linear+moh_75"),
    HeadsConfig.from_preset("talking"),
    HeadsConfig(Knock(value="mlp"), CollaborativeHeads(dim=14)),
    HeadsConfig.from_preset("gate_output"),
    GATES,
    HeadsConfig(Gate(output="head", value="shared", reads_input=False)),
)
"""Mechanisms beside the knock, whose tensors, rows and FLOPs the counts must know."""

EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_shared_expert_intermediate_size": 16,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
}


def built(layout: Layout, kha: HeadsConfig, *, tied: bool = True, **overrides: Any) -> tuple:
    """Return the virtual stages of this rank, their configuration, the model and the stage."""
    from dataclasses import replace

    from megatron.core import parallel_state

    from tests.distributed import models

    sizes = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.expert_tp,
    }
    models.initialize(**sizes)
    config = models.transformer_config(
        **sizes,
        sequence_parallel=layout.sequence_parallel,
        overlap_p2p_comm=True,
        batch_p2p_comm=False,
        account_for_loss_in_pipeline_split=layout.loss_as_layer,
        **overrides,
    )
    stage = parallel_state.get_pipeline_model_parallel_rank()
    chunks = []
    for number in range(layout.vpp or 1):
        vp_stage = number if layout.vpp else None
        chunks.append(
            models.gpt_model(
                config,
                kha,
                pre_process=stage == 0 and number == 0,
                post_process=stage == layout.pp - 1 and number == (layout.vpp or 1) - 1,
                share_embeddings_and_output_weights=tied,
                vp_stage=vp_stage,
            )
        )
    model = replace(
        model_from_config(config, kha),
        padded_vocab_size=models.VOCAB,
        untie_embeddings_and_output_weights=not tied,
    )
    return chunks, config, model, stage
