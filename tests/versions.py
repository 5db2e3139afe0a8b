"""Skipping, loudly, what the installed Megatron-Core is too old for."""

from typing import Any

import pytest

from kha_megatron.mcore.compat import FAMILY, HYBRID, installed_version, release, training_refusal


def needs_training_package() -> None:
    """Skip the test, or all tests of the fixture, that run what stands on ``megatron.training``."""
    if why := training_refusal(installed_version()):
        pytest.skip(f"NOT TESTED: {why}")


def needs_hybrid_models() -> None:
    """Skip where Megatron-Core has no HybridModel."""
    if release(found := installed_version()) < HYBRID:
        pytest.skip(f"NOT TESTED: megatron-core {found} has no HybridModel")


def needs_fsdp2() -> None:
    """Skip where Megatron-Core's wrapper of torch's FSDP2 cannot be trained with."""
    if release(found := installed_version()) < (0, 19):
        pytest.skip(
            f"NOT TESTED: the FSDP2 wrapper of megatron-core {found} does not take what its own "
            "finalize_model_grads passes"
        )


def needs_added_losses() -> None:
    """Skip where Megatron-Core does not say how to scale a loss of attention layers."""
    if not has_added_losses():
        pytest.skip(f"NOT TESTED: megatron-core {installed_version()} scales no losses of heads")


def has_added_losses() -> bool:
    """Whether a load-balance loss of heads can be trained on."""
    return release(installed_version()) >= (0, 19)


def on_this_cp_rank(batch: dict[str, Any], cp_group: Any) -> dict[str, Any]:
    """Megatron's ``get_batch_on_this_cp_rank`` for a plain batch, whatever the version asks for."""
    from megatron.core.utils import get_batch_on_this_cp_rank

    plain = {} if release(installed_version()) < (0, 18) else {"is_hybrid_cp": False}
    return get_batch_on_this_cp_rank(batch, cp_group=cp_group, **plain)


def needs_attention_family() -> None:
    """Skip where Megatron-Core is too old for knocked MLA, GLA and GTA, and collaborative heads."""
    if not has_attention_family():
        pytest.skip(
            f"NOT TESTED: megatron-core {installed_version()} is too old for MLA, GLA and GTA with "
            "KHA, and for collaborative heads"
        )


def has_attention_family() -> bool:
    """Whether knocked MLA, GLA and GTA, and collaborative heads, can be built."""
    return release(installed_version()) >= FAMILY
