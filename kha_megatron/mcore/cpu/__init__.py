"""CPU runtime for Megatron-Core, for tests without a GPU.

:func:`install` redirects CUDA to the CPU in the current process. All kinds of parallelism run with
gloo. You have to call it before importing Megatron::

    from kha_megatron.mcore import cpu

    cpu.install()
    from megatron.core.models.gpt import GPTModel
"""

from kha_megatron.mcore.cpu.runtime import install, is_installed

__all__ = ["ENVIRONMENT", "MEGATRON_FLAGS", "install", "is_installed"]

MEGATRON_FLAGS: dict[str, str | None] = {
    "--distributed-backend": "gloo",
    "--transformer-impl": "local",
    "--no-persist-layer-norm": None,
    "--no-gradient-accumulation-fusion": None,
    "--no-masked-softmax-fusion": None,
    "--no-bias-swiglu-fusion": None,
    "--no-bias-dropout-fusion": None,
    "--no-rope-fusion": None,
}
"""Megatron arguments needed for the CPU runtime (None if a flag takes no value)."""

ENVIRONMENT: dict[str, str] = {
    "OMP_NUM_THREADS": "1",  # ranks share the CPU cores
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron checks this with TP or CP
}
"""Environment variables to set for each rank, unless they are already set."""
