"""How a model is spread over ranks: its sizes, the parallel sizes and the batch, as plain data.

Which combinations are legal is in :mod:`kha_megatron.model.rules`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kha_megatron.model.qkv import QKVLayout


@dataclass(frozen=True, kw_only=True)
class Model:
    """The sizes of a GPT model that parallelism divides, under Megatron's names.

    Linear layers have no bias. None stands for what is not known where a check is made, or for
    what the model does not have.
    """

    num_layers: int | None
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    """Key/value heads; as many as query heads in MHA."""
    kv_channels: int
    """Features of one head."""
    ffn_hidden_size: int | None
    """Width of the dense layers' MLP."""
    num_experts: int | None = None
    moe_ffn_hidden_size: int | None = None
    moe_shared_expert_intermediate_size: int | None = None
    moe_router_topk: int = 2
    moe_layers: tuple[bool, ...] = ()
    """Which layers are MoE; empty for all of them where there are experts."""
    vocab_size: int | None = None
    """Rows of the embedding before Megatron pads them for tensor parallelism."""
    vocab_padding: int = 128
    """``--make-vocab-size-divisible-by``; 0 where the vocabulary is not padded."""
    swiglu: bool = True
    qk_layernorm: bool = True
    attention_output_gate: bool = False
    tied_embeddings: bool = True
    norm_parameters: int = 1
    """Parameters of a norm for each feature: 1 for RMSNorm, 2 for LayerNorm."""
    tied_keys: bool = False
    """Grouped-Tied Attention: half of a key is the value, and there is no key projection."""
    latents: tuple[tuple[str, int], ...] = ()
    """Widths of latent attention that tensor parallelism cuts, by the flags that set them; see
    :func:`latents`."""
    latent_width: int | None = None
    """Features of the latent of keys and values; None without latent attention."""
    latent_heads: int = 1
    """Heads of that latent: 1 in MLA."""

    def is_moe(self, layer: int) -> bool:
        """Whether the layer (counted from 0) has experts."""
        return bool(self.num_experts) and (not self.moe_layers or self.moe_layers[layer])

    @property
    def has_dense_layers(self) -> bool:
        """Whether at least one layer has the dense MLP."""
        return not self.num_experts or not all(self.moe_layers or (True,))

    @property
    def qkv(self) -> QKVLayout:
        """The rows of the QKV projection, which all kinds of attention but the latent ones have."""
        return QKVLayout(
            groups=self.num_query_groups,
            queries=self.num_attention_heads // self.num_query_groups,
            head_dim=self.kv_channels,
            gated=self.attention_output_gate,
            tied=self.tied_keys,
        )

    def padded_vocab_size(self, tp: int) -> int:
        """Rows of the embedding as Megatron builds it for ``tp`` tensor-parallel ranks."""
        unit = (self.vocab_padding or 1) * (tp if self.vocab_padding else 1)
        return -(-self.vocab_size // unit) * unit


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Parallel sizes. The data-parallel size is what they leave of the world."""

    world_size: int | None = None
    """Ranks in all; None where it is not known."""
    tp: int = 1
    """Tensor-parallel size."""
    pp: int = 1
    """Pipeline-parallel size."""
    vpp: int | None = None
    """Virtual pipeline stages of each rank; None for the plain 1F1B schedule."""
    cp: int = 1
    """Context-parallel size."""
    ep: int = 1
    """Expert-parallel size."""
    etp: int | None = None
    """Expert-tensor-parallel size; as ``tp`` if None."""
    sequence_parallel: bool = False
    overlap_p2p: bool = True
    """Whether virtual stages overlap their point-to-point communication."""
    microbatch_group: int | None = None
    """``--microbatch-group-size-per-virtual-pipeline-stage``; as ``pp`` if None."""
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    embedding_as_layer: bool = False
    """``--account-for-embedding-in-pipeline-split``."""
    loss_as_layer: bool = False
    """``--account-for-loss-in-pipeline-split``."""
    stages: tuple[str, ...] | None = None
    """A custom layout, unrolled: one word for each stage in the order of the layers, of the letters
    ``E`` (embedding), ``t`` (layer), ``m`` (multi-token prediction) and ``L`` (loss)."""

    @property
    def expert_tp(self) -> int:
        """Ranks over which one expert is split."""
        return self.tp if self.etp is None else self.etp

    @property
    def dp(self) -> int:
        """Data-parallel size: replicas that read different samples."""
        return self.world_size // (self.tp * self.pp * self.cp)

    @property
    def expert_dp(self) -> int:
        """Replicas of an expert."""
        return self.world_size // (self.expert_tp * self.ep * self.pp)

    def chunk_layers(self, num_layers: int) -> list[list[int]]:
        """Number of layers of each virtual stage, ``[vpp][pp]``, in the order of the layers."""
        chunks = self.vpp or 1
        if self.stages is not None:
            words = [word.count("t") for word in self.stages]
            return [words[c * self.pp : (c + 1) * self.pp] for c in range(chunks)]
        ends = {0: self.first_stage_layers, self.pp - 1: self.last_stage_layers}
        ends = {rank: layers for rank, layers in ends.items() if layers is not None}
        left = num_layers - sum(ends.values()) + self.embedding_as_layer + self.loss_as_layer
        even = left // max(1, self.pp - len(ends))
        counts = [
            [ends.get(rank, even) // chunks for rank in range(self.pp)] for _ in range(chunks)
        ]
        counts[0][0] -= self.embedding_as_layer
        counts[-1][-1] -= self.loss_as_layer
        return counts


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What one step trains on."""

    seq_length: int
    micro_batch_size: int = 1
    """Sequences that a model replica takes at once."""
    global_batch_size: int | None = None
    """Sequences of one optimizer step, over all replicas."""

    def microbatches(self, dp: int) -> int:
        """How many times a replica runs forward and backward before the optimizer steps."""
        return self.global_batch_size // (self.micro_batch_size * dp)


def moe_pattern(frequency: int | Sequence[int], layers: int) -> tuple[bool, ...]:
    """Megatron's ``moe_layer_freq`` as one flag a layer: every n-th, or a list of 0 and 1."""
    if isinstance(frequency, int):
        return tuple(layer % frequency == 0 for layer in range(layers))
    return tuple(map(bool, frequency))


def latents(
    query: int | None, key_value: int, position: int, *, down_projections_cut: bool
) -> tuple[tuple[str, int], ...]:
    """:attr:`Model.latents` from Megatron's sizes of multi-latent attention.

    Args:
        query: ``--q-lora-rank``; None for queries without a latent.
        key_value: ``--kv-lora-rank``.
        position: ``--qk-pos-emb-head-dim``.
        down_projections_cut: whether tensor parallelism cuts the down-projections, as without
            Transformer Engine and with ``--mla-down-proj-fusion``; else every rank has them whole.
    """
    if not down_projections_cut:
        return ()
    joint = ("--kv-lora-rank plus --qk-pos-emb-head-dim", key_value + position)
    return (("--q-lora-rank", query), joint) if query else (joint,)
