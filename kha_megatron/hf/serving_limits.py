"""What vLLM cannot compute of the architecture, refused by name before it serves a wrong token."""

from typing import Any

_WITHOUT_A_SERVER = ("moh", "talking", "collaborative")
_TRANSFORMERS = "serve it with transformers (`import kha_megatron.hf`)"
_FOLD = "or fold it (`kha-megatron convert fold`), and serve the model that comes out"


def unserved(config: Any, *, by_backend: bool) -> str | None:
    """Why vLLM must not serve a model; None if it may.

    Args:
        config: a ``KHAModelConfig``.
        by_backend: whether vLLM runs our transformers classes (``--model-impl transformers``), and
            not the model of ``kha_megatron.serving``.
    """
    kha = config.kha
    remedy = f"{_TRANSFORMERS}, {_FOLD}" if kha.folds and kha.mechanisms else _TRANSFORMERS
    if kind := _other_attention(config):
        if config.kha_attention is not None:
            remedy = _TRANSFORMERS
        return f"vLLM keeps keys and values of MHA, MQA and GQA, not of {kind}: {remedy}"
    if other := next((m for m in kha.others if m.name in _WITHOUT_A_SERVER), None):
        return f"vLLM's attention has no place for {other}: {remedy}"
    if config.hidden_act != "silu":  # its experts take no notice of the word
        return f"vLLM computes SiLU, not hidden_act={config.hidden_act!r}: {remedy}"
    best = 2 if config.scoring_func == "sigmoid" else 1
    each = config.num_experts_per_tok // config.topk_group
    if by_backend and config.n_group > 1 and each != best:
        return (
            f"vLLM's Transformers backend ranks the n_group={config.n_group} groups of experts by "
            f"their best {best}, and this model by their best {each}: leave out --model-impl, so "
            "that the model of kha_megatron.serving is taken"
        )
    return None


def _other_attention(config: Any) -> str | None:
    if config.kha_attention is not None:
        return f"kha_attention={config.kha_attention!r}"
    if config.kv_lora_rank is not None:
        return f"multi-head latent attention (kv_lora_rank={config.kv_lora_rank})"
    return None
