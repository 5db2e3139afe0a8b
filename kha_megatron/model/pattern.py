"""Layer patterns of hybrid models (``--hybrid-layer-pattern``).

In the pattern, attention and MLP are separate layers. For example, ``*-*E|*E*E/*E`` has four pairs
of attention and MLP, the last three with experts, in two pipeline stages, and predicts one
additional token.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from kha_megatron.errors import ConfigError
from kha_megatron.model.fields import MAX_LAYERS, as_flag

PATTERN_ARGUMENT = "hybrid_layer_pattern"

_ATTENTION = "*"
_LATENT_ATTENTION = "+"
_DENSE = "-"
_EXPERTS = "E"
ATTENTION = {_ATTENTION: False, _LATENT_ATTENTION: True}
"""Attention symbols, and whether the attention is multi-latent."""
MLP = {_DENSE: 0, _EXPERTS: 1}
"""MLP symbols, and whether the MLP is a mixture of experts."""

_MAX_LENGTH = 3 * MAX_LAYERS
"""Two symbols for each pair of attention and MLP, and one for the end of a pipeline stage."""

_GPT_ONLY = (
    "no_rope_freq",
    "window_attn_skip_freq",
    "linear_attention_freq",
    "heterogeneous_layers_config_path",
    "heterogeneous_layers_config_encoded_json",
)
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
        """Parse a pattern. Returns None if it does not alternate between attention and MLP.

        Raises:
            ConfigError: If it has too many layers.
        """
        main, *predictions = text.split("/")
        _check_length("layers", len(main))
        _check_length("predicted tokens", len(predictions))
        symbols = main.replace("|", "")
        if not symbols or len(symbols) % 2:
            return None
        # attention and MLP alternate
        attentions = symbols[::2]
        mlps = symbols[1::2]
        attention = attentions[0]
        if attention not in ATTENTION or set(attentions) != {attention}:
            return None
        if not set(mlps) <= MLP.keys():
            return None
        last_pair = symbols[-2:]
        if any(prediction != last_pair for prediction in predictions):
            return None
        stages = main.split("|")
        return cls(
            moe=tuple(MLP[mlp] for mlp in mlps),
            stages=tuple(stage.count(attention) for stage in stages),
            latent=ATTENTION[attention],
            predictions=len(predictions),
        )

    def __str__(self) -> str:
        attention = _LATENT_ATTENTION if self.latent else _ATTENTION
        pairs = []
        for is_moe in self.moe:
            mlp = _EXPERTS if is_moe else _DENSE
            pairs.append(attention + mlp)
        stages = []
        start = 0
        for count in self.stages:
            stage = pairs[start : start + count]
            stages.append("".join(stage))
            start += count
        predictions = f"/{pairs[-1]}" * self.predictions
        return "|".join(stages) + predictions


def _check_length(name: str, count: int) -> None:
    if count > _MAX_LENGTH:
        raise ConfigError(
            f"--hybrid-layer-pattern has {count:,} {name}, at most {_MAX_LENGTH:,} are supported."
        )


def check_no_gpt_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError for Megatron arguments that only work with ``--gpt-model``.

    A :class:`~kha_megatron.model.run.Run` uses the flag as name of arguments that it does not know.
    """
    for name in _GPT_ONLY:
        flag = as_flag(name)
        if arguments.get(name) or arguments.get(flag):
            raise ConfigError(f"{flag} is only supported by GPTModel. Please add --gpt-model.")
