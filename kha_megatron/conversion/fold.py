"""A model with linear knocking heads to a stock architecture that any server runs."""

from pathlib import Path

from kha_megatron.conversion.opening import open_checkpoint, parse_dtype
from kha_megatron.conversion.to_hf import AUTO, HFPlan, plan_for
from kha_megatron.conversion.transforms import Folded


def plan(
    source: Path,
    *,
    architecture: str = AUTO,
    dtype: str | None = None,
    tokenizer: Path | None = None,
) -> HFPlan:
    """Open a checkpoint of either side whose knocking heads are linear, to write it without them.

    Args:
        source: Megatron or ``kha``.
        architecture: a stock ``model_type``; ``auto`` is ``deepseek_v3`` for MLA, and goes by the
            router otherwise: ``qwen3`` for dense models, ``qwen3_moe`` for softmax and ``glm4_moe``
            for sigmoid scores. GTA and GLA have no stock architecture.
        dtype: see ``to_hf.plan``.
        tokenizer: see ``to_hf.plan``.

    Raises:
        CheckpointError: the model is damaged, has nothing to fold or a variant that does not fold,
            or the architecture cannot express it.
        ConfigError: the dtype or the tokenizer folder does not exist.
    """
    parse_dtype(dtype)
    opened = open_checkpoint(source, tokenizer=tokenizer)
    return plan_for(opened._replace(source=Folded(opened.source)), architecture, dtype)
