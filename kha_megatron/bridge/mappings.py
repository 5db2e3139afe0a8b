"""Which Megatron parameter is which Hugging Face tensors, for Megatron-Bridge.

``*`` stands for a layer and, after it, an expert. Norms have two names in Megatron: Transformer
Engine fuses them into the linear layer behind them. Bridge's registry knows the other name of those
written here.
"""

from typing import Any

import torch
from megatron.bridge.models.conversion.param_mapping import (
    AutoMapping,
    GatedMLPMapping,
    MegatronParamMapping,
    QKVMapping,
    ReplicatedMapping,
)
from torch import Tensor, nn

from kha_megatron.heads import HeadTensor
from kha_megatron.hf import KHAModelConfig

_ONE_TO_ONE = (
    ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    ("self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
    ("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
    ("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
    ("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight"),
    ("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
    ("mlp.linear_fc2.weight", "mlp.down_proj.weight"),
    ("mlp.router.weight", "mlp.gate.weight"),
    ("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias"),
    ("mlp.shared_experts.linear_fc2.weight", "mlp.shared_experts.down_proj.weight"),
    # grouped GEMM names an expert's weights one way, a list of MLPs another
    ("mlp.experts.linear_fc2.weight*", "mlp.experts.*.down_proj.weight"),
    ("mlp.experts.local_experts.*.linear_fc2.weight", "mlp.experts.*.down_proj.weight"),
)
_GATE_UP = (
    ("mlp.linear_fc1.weight", "mlp.{}_proj.weight"),
    ("mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts.{}_proj.weight"),
    ("mlp.experts.linear_fc1.weight*", "mlp.experts.*.{}_proj.weight"),
    ("mlp.experts.local_experts.*.linear_fc1.weight", "mlp.experts.*.{}_proj.weight"),
)
_QKV = (
    ("self_attention.linear_qkv.weight", "self_attn.{}_proj.weight"),
    ("self_attention.linear_qkv.bias", "self_attn.{}_proj.bias"),
)

MEGATRON, HF = "decoder.layers.*.", "model.layers.*."


class VocabularyMapping(AutoMapping):
    """Rows of the vocabulary: Megatron's are padded to a multiple, Hugging Face's are not."""

    def __init__(self, megatron_param: str, hf_param: str, vocab_size: int) -> None:
        super().__init__(megatron_param, hf_param)
        self.vocab_size = vocab_size

    def hf_to_megatron(self, hf_weights: Tensor, megatron_module: nn.Module) -> Tensor:
        """``[vocab_size, C]`` to this rank's rows, zeros below the last entry."""
        # under several ranks Bridge pads by itself
        rows = len(megatron_module.get_parameter("weight"))
        padding = rows - len(hf_weights) if self.tp_size == 1 else 0
        if padding > 0:
            hf_weights = nn.functional.pad(hf_weights, (0, 0, 0, padding))
        return super().hf_to_megatron(hf_weights, megatron_module)

    def megatron_to_hf(
        self, megatron_weights: Tensor | None, megatron_module: nn.Module | None
    ) -> dict[str, Tensor]:
        """``[vocab_size, C]`` by its name."""
        gathered = super().megatron_to_hf(megatron_weights, megatron_module)
        return {name: weight[: self.vocab_size] for name, weight in gathered.items()}

    def resolve(self, captures: tuple[str, ...]) -> "VocabularyMapping":
        """This mapping anew: there is no ``*`` in its names to fill in."""
        return type(self)(self.megatron_param, self.hf_param, self.vocab_size)


class SharedMatricesMapping(MegatronParamMapping[dict[str, Tensor]]):
    """``[n, D, D]``, ``x @ W``, on every rank: each matrix is an ``nn.Linear``'s weight there.

    Args:
        megatron_param: the stacked parameter.
        hf_param: Hugging Face names of the matrices, in the order in which they are stacked.
    """

    def __init__(self, megatron_param: str, hf_param: dict[str, str]) -> None:
        super().__init__(megatron_param, hf_param)
        self._replicated = ReplicatedMapping(megatron_param, megatron_param)

    def hf_to_megatron(self, hf_weights: dict[str, Tensor], megatron_module: nn.Module) -> Tensor:
        """Transpose and stack, the same on every rank."""
        stacked = torch.stack([hf_weights[matrix].T for matrix in self.hf_param])
        return self._replicated.hf_to_megatron(stacked, megatron_module)

    def megatron_to_hf(
        self, megatron_weights: Tensor | None, megatron_module: nn.Module | None
    ) -> dict[str, Tensor]:
        """Each matrix, transposed, by its name."""
        found = self._replicated.megatron_to_hf(megatron_weights, megatron_module)
        return {
            name: weight.T.contiguous()
            for stacked in found.values()
            for name, weight in zip(self.hf_param.values(), stacked, strict=True)
        }


def mappings(config: KHAModelConfig | None) -> list[MegatronParamMapping[Any]]:
    """All mappings of a model.

    Args:
        config: says which matrices are stacked, whether embeddings are tied, and how many rows of
            the vocabulary are real. None (Bridge asks so for adapters, which sit in linear layers
            only) leaves those tensors out.
    """
    layers: list[MegatronParamMapping[Any]] = [
        *(AutoMapping(MEGATRON + ours, HF + name) for ours, name in _ONE_TO_ONE),
        *(GatedMLPMapping(MEGATRON + ours, *_of(name, "gate", "up")) for ours, name in _GATE_UP),
        *(QKVMapping(MEGATRON + ours, *_of(name, "q", "k", "v")) for ours, name in _QKV),
        # a bare parameter of a module that is not parallel, of whose kind Bridge knows nothing
        ReplicatedMapping(
            f"{MEGATRON}mlp.shared_experts.gate_weight", f"{HF}mlp.shared_expert_gate.weight"
        ),
    ]
    final_norm = AutoMapping("decoder.final_layernorm.weight", "model.norm.weight")
    if config is None:
        return [final_norm, *layers]
    matrices = [_matrices(tensor) for tensor in config.kha.tensors(config.head_sizes)]
    return [*_vocabulary(config), final_norm, *layers, *matrices]


def _of(pattern: str, *words: str) -> list[str]:
    return [HF + pattern.format(word) for word in words]


def _vocabulary(config: KHAModelConfig) -> list[VocabularyMapping]:
    names = {"embedding.word_embeddings.weight": "model.embed_tokens.weight"}
    if not config.tie_word_embeddings:
        names["output_layer.weight"] = "lm_head.weight"
    return [VocabularyMapping(ours, theirs, config.vocab_size) for ours, theirs in names.items()]


def _matrices(tensor: HeadTensor) -> SharedMatricesMapping:
    names = [HF + name for name in tensor.hf_names]
    return SharedMatricesMapping(
        MEGATRON + tensor.key, dict(zip(tensor.matrices, names, strict=True))
    )
