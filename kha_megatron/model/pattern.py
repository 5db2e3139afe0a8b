"""Layer patterns of hybrid models (``--hybrid-layer-pattern``).

In the pattern, attention and MLP are separate layers. For example, ``*-*E|*E*E/*E`` has four pairs
of attention and MLP, the last three with experts, in two pipeline stages, and predicts one
additional token.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Self

from kha_megatron.errors import ConfigError
from kha_megatron.model.fields import MAX_LAYERS

ATTENTION = {"*": False, "+": True}
"""Attention symbols, and whether the attention is multi-latent."""
MLP = {"-": 0, "E": 1}
"""MLP symbols, and whether the MLP is a mixture of experts."""

_MAX_LENGTH = 3 * MAX_LAYERS
"""Two symbols for each pair of attention and MLP, and one for the end of a pipeline stage."""

_GPT_ONLY = {
    "no_rope_freq": "--no-rope-freq",
    "window_attn_skip_freq": "--window-attn-skip-freq",
    "linear_attention_freq": "--linear-attention-freq",
    "heterogeneous_layers_config_path": "--heterogeneous-layers-config-path",
    "heterogeneous_layers_config_encoded_json": "--heterogeneous-layers-config-encoded-json",
}
"""Arguments that refer to the layers of a GPTModel."""


@dataclass(frozen=True)
class LayerPattern:
    """A pattern that alternates between attention and MLP, like the layers of a GPTModel."""

    moe: tuple[int, ...]
    """For each pair, whether its MLP is a mixture of experts (0 or 1)."""
    stages: tuple[int, ...]
    """Number of attention layers in each pipeline stage."""
    latent: bool = False
    predictions: int = 0
    """Number of additional tokens to predict. Their layers are like the last pair."""

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Parse a pattern. Returns None if it doesn't alternate between attention and MLP.

        Raises:
            ConfigError: If it has too many layers.
        """
        main, *predictions = text.split("/")
        for what, count in (("layers", len(main)), ("predicted tokens", len(predictions))):
            if count > _MAX_LENGTH:
                raise ConfigError(
                    f"--hybrid-layer-pattern has {count:,} {what}, at most {_MAX_LENGTH:,} are "
                    "supported."
                )
        symbols = main.replace("|", "")
        attention, mlps = set(symbols[::2]), symbols[1::2]
        if len(symbols) % 2 or len(attention) != 1 or not attention <= ATTENTION.keys():
            return None
        if not set(mlps) <= MLP.keys() or set(predictions) - {symbols[-2:]}:
            return None
        stages = (sum(stage.count(kind) for kind in ATTENTION) for stage in main.split("|"))
        moe = tuple(MLP[mlp] for mlp in mlps)
        return cls(moe, tuple(stages), ATTENTION[attention.pop()], len(predictions))

    def __str__(self) -> str:
        (attention,) = (kind for kind, latent in ATTENTION.items() if latent == self.latent)
        mlps = {is_moe: mlp for mlp, is_moe in MLP.items()}
        pairs = [attention + mlps[is_moe] for is_moe in self.moe]
        rest = iter(pairs)
        stages: Iterator[str] = ("".join(islice(rest, count)) for count in self.stages)
        return "|".join(stages) + self.predictions * f"/{pairs[-1]}"


def check_no_gpt_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError for Megatron arguments that only work with ``--gpt-model``."""
    for name, flag in _GPT_ONLY.items():
        if arguments.get(name) or arguments.get(flag):
            raise ConfigError(f"{flag} is only supported by GPTModel. Please add --gpt-model.")
