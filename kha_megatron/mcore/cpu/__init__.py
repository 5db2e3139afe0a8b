"""Megatron-Core on a machine without a GPU: CPU tensors, gloo, nothing patched in Megatron.

Megatron-Core names CUDA devices throughout. :func:`install` makes "cuda" mean the CPU for the
whole process, so that the very code that trains on GPUs runs here, all its parallelisms included.
It is a correctness device, not a fast one: call it before ``import megatron``, once per process::

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
"""Environment of every rank, but for what the user has set."""
