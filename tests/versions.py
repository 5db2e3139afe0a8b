"""Skipping, loudly, what the installed Megatron-Core is too old for."""

import pytest

from kha_megatron.mcore.compat import HYBRID, installed_version, release, training_refusal


def needs_training_package() -> None:
    """Skip the test, or all tests of the fixture, that run what stands on ``megatron.training``."""
    if why := training_refusal(installed_version()):
        pytest.skip(f"NOT TESTED: {why}")


def needs_hybrid_models() -> None:
    """Skip where Megatron-Core has no HybridModel."""
    if release(found := installed_version()) < HYBRID:
        pytest.skip(f"NOT TESTED: megatron-core {found} has no HybridModel")
