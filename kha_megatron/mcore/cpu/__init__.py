"""Run Megatron-Core without a GPU, on CPU tensors and gloo.

:func:`install` makes "cuda" mean the CPU for the whole process, so that all parallelisms run
unchanged. It is for correctness, not speed. Call it once per process, before ``import megatron``::

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
"""Megatron arguments that turn off CUDA-only kernels. None marks a flag without a value."""

ENVIRONMENT: dict[str, str] = {
    "OMP_NUM_THREADS": "1",  # ranks share the cores; torch's default would oversubscribe them
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron's argument check asks for it with TP or CP
}
"""Environment of every rank, unless the user has set it."""
