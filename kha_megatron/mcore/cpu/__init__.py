"""CPU runtime for Megatron-Core, to check results without a GPU.

:func:`install` redirects CUDA devices to the CPU in the whole process, so that all parallelisms run
with gloo. It must be called before Megatron is imported::

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
"""Megatron arguments for the CPU runtime. Flags without a value map to None."""

ENVIRONMENT: dict[str, str] = {
    "OMP_NUM_THREADS": "1",  # avoids oversubscription, because ranks share the cores
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # checked by Megatron with TP or CP
}
"""Default environment variables of every rank."""
