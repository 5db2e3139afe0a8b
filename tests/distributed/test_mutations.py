"""Without one of the rules for gradients, losses or placement, the comparison fails."""

import re
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from tests.distributed.cases import (
    GATED_MLA,
    GATES,
    GTA,
    LATENT,
    LINEAR,
    MLA,
    MOH,
    RANDOM,
    TIED,
    case,
)
from tests.distributed.parallelism import train
from tests.distributed.pieces import errors, quantities
from tests.distributed.test_parallelism import FP32


def without_copy_on_matrices():
    from kha_megatron.mcore import knocking

    return mock.patch.object(
        knocking, "copy_to_tensor_model_parallel_region", lambda weight, group=None: weight
    )


def with_layers_counted_from_the_stage():
    from megatron.core import parallel_state

    from kha_megatron.mcore.attention import KHASelfAttention

    build = KHASelfAttention._add_knocking

    def counted_from_one(self, kha):
        each = self.config.num_layers // parallel_state.get_pipeline_model_parallel_world_size()
        with mock.patch.object(self, "layer_number", (self.layer_number - 1) % each + 1):
            build(self, kha)

    return mock.patch.object(KHASelfAttention, "_add_knocking", counted_from_one)


def with_matrices_reduced_like_experts():
    from kha_megatron.mcore.knocking import KnockingHeads

    reset = KnockingHeads.reset_parameters

    def reset_and_mark(self):
        reset(self)
        self.weight.allreduce = False

    return mock.patch.object(KnockingHeads, "reset_parameters", reset_and_mark)


def with_megatrons_rotary_key():
    """If this is no longer found, Megatron is fixed and the override in latent.py can go."""
    from kha_megatron.mcore.latent import _KnockedLatentAttention as Ours

    def project(self, hidden):
        return super(Ours, self)._qkv_down_projection(hidden)

    return mock.patch.object(Ours, "_qkv_down_projection", project)


def with_megatrons_query_norm():
    """If this is no longer found, Megatron is fixed and the override in latent.py can go."""
    from kha_megatron.mcore.latent import _KnockedLatentAttention as Ours

    return mock.patch.object(Ours, "_average_query_norm_gradients")


def without_copy_of_rotary_key():
    from kha_megatron.mcore import gta

    return mock.patch.object(gta, "copy_to_tensor_model_parallel_region", lambda x, group=None: x)


def with_copy_on_projections():
    """Sum equal gradients of ranks that see the same tokens."""
    from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region as copy

    from kha_megatron.mcore.head_inputs import InputProjection

    project = InputProjection.forward

    def forward(self, hidden=None):
        with mock.patch.dict(self._parameters, weight=copy(self.weight, group=self.tp_group)):
            return project(self, hidden)

    return mock.patch.object(InputProjection, "forward", forward)


def without_sum_over_tokens():
    from kha_megatron.mcore import head_inputs

    copy = head_inputs.copy_to_tensor_model_parallel_region

    def copy_activations(x, group=None):
        return x if isinstance(x, torch.nn.Parameter) else copy(x, group=group)

    return mock.patch.object(head_inputs, "copy_to_tensor_model_parallel_region", copy_activations)


def without_sum_over_heads():
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region as gather

    from kha_megatron.mcore.head_inputs import InputProjection

    def gather_only(self, x):
        if not self.config.sequence_parallel:
            return x
        return gather(x, tensor_parallel_output_grad=False, group=self.tp_group)

    return mock.patch.object(InputProjection, "_sum_over_heads", gather_only)


def with_load_of_one_cp_rank():
    from kha_megatron.heads.ranks import Ranks
    from kha_megatron.mcore.head_ranks import HeadRanks

    return mock.patch.object(HeadRanks, "token_mean", Ranks.token_mean)


@contextmanager
def with_megatrons_loss_scale():
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    from kha_megatron.mcore import head_ranks

    scale = MoEAuxLossAutoScaler.main_loss_backward_scale
    with mock.patch.object(
        head_ranks, "with_loss", lambda x, loss, scale: MoEAuxLossAutoScaler.apply(x, loss)
    ):
        yield
    MoEAuxLossAutoScaler.main_loss_backward_scale = scale


def with_sequences_counted_by_every_cp_rank():
    from kha_megatron.mcore import head_ranks

    add = head_ranks.with_loss
    return mock.patch.object(
        head_ranks, "with_loss", lambda x, loss, scale: add(x, loss * 2, scale)
    )


def without_gradients_of_the_fold():
    """Use the gradient of the folded weight for the weight itself."""
    from kha_megatron.mcore.step_folding import StepFold

    return mock.patch.object(StepFold, "finish", StepFold._restore)


def without_sum_of_folded_matrices():
    from kha_megatron.mcore import step_folding

    return mock.patch.object(step_folding, "dist")


MATRICES_DIFFER = r"replicas of .*\.knock_\w+\.weight differ"
GRADIENT = r"gradients decoder\.layers\.\d+\.self_attention\."
ROUTER = rf"{GRADIENT}moh_router"
LATENT_TP = {"tp": 2, "config": LATENT}
FOLDED = {"khas": (LINEAR,), "fold": True}
GATES_TP = {"khas": (GATES,), "tp": 2}
GTA_TP = {"khas": (GTA,), "tp": 2, "config": TIED}


@pytest.mark.fast
@pytest.mark.parametrize(
    ("mutate", "fields", "expected"),
    [
        (without_copy_on_matrices, {"tp": 2}, MATRICES_DIFFER),
        (without_copy_on_matrices, {"tp": 2, "sp": True}, MATRICES_DIFFER),
        (with_layers_counted_from_the_stage, {"pp": 2, "khas": (RANDOM,)}, r"initial .*\.knock_"),
        (with_matrices_reduced_like_experts, {"dp": 2, "ep": 2, "model": "moe"}, MATRICES_DIFFER),
        (with_megatrons_rotary_key, {"khas": (MLA,)} | LATENT_TP, "linear_kv_down_proj"),
        (with_megatrons_query_norm, {"khas": (MLA,)} | LATENT_TP, rf"{GRADIENT}q_layernorm"),
        (without_copy_of_rotary_key, GTA_TP, "replicas of"),
        (without_copy_of_rotary_key, GTA_TP | {"sp": True}, "replicas of"),
        (with_copy_on_projections, GATES_TP, f"(?s){GRADIENT}gate_dense.*{GRADIENT}gate_key"),
        (without_sum_over_tokens, GATES_TP | {"sp": True}, r"replicas of .*gate_(dense|key)"),
        (without_sum_over_heads, GATES_TP, "replicas of (input gradient|.*gate_key)"),
        (without_sum_over_heads, GATES_TP | {"sp": True}, f"{GRADIENT}gate_key|replicas of .*key"),
        (without_sum_over_heads, {"khas": (GATED_MLA,)} | LATENT_TP, "replicas of"),
        (with_load_of_one_cp_rank, {"khas": (MOH,), "layers": 4, "cp": 2}, ROUTER),
        (with_sequences_counted_by_every_cp_rank, {"khas": (MOH,), "layers": 4, "cp": 2}, ROUTER),
        (with_megatrons_loss_scale, {"khas": (MOH,), "layers": 4}, ROUTER),
        (without_gradients_of_the_fold, FOLDED, rf"(?s){GRADIENT}knock.*{GRADIENT}linear_qkv"),
        (without_sum_of_folded_matrices, FOLDED | {"tp": 2}, MATRICES_DIFFER),
    ],
)
def test_a_missing_rule_is_found(ranks, unsharded, mutate, fields, expected):
    """In gradients, or in replicas that differ, but not in the loss."""
    tested = case(**fields)
    (want,) = unsharded(tested)
    right, wrong = (
        differences(ranks(train, tested.layout.world, tested, change), want)
        for change in (None, mutate)
    )
    assert not right
    assert re.search(expected, wrong), wrong


def differences(results, want) -> str:
    """Return the names of wrong quantities, or how replicas differ."""
    try:
        found = errors(quantities([result for (result,) in results]), want)
    except AssertionError as difference:
        return str(difference)
    return "\n".join(sorted(name for name, e in found.items() if not e <= FP32))
