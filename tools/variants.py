"""What the benchmarks of layers and of steps compare: ways to run a model with and without KHA."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kha_megatron.config import KHAConfig
from kha_megatron.heads.knock import Fold
from kha_megatron.ops.fused import KERNELS_VARIABLE

STOCK = "stock"


@dataclass(frozen=True)
class Variant:
    """One row of a table."""

    name: str
    """On the command line."""

    preset: str | None
    """A key of ``kha_megatron.config.PRESETS``; None is Megatron's own layer, nothing of ours."""

    kernels: bool = False
    """Use the Triton kernels or raise an error; otherwise always torch."""

    folded: bool = False
    """Linear matrices go into the QKV weight of every microbatch; otherwise never."""

    def kha(self) -> KHAConfig:
        """What is knocked, and how."""
        return KHAConfig.from_preset(self.preset or "baseline", fold=self._fold)

    def words(self) -> list[str]:
        """Arguments for ``-m kha_megatron.training``."""
        return ["--kha-preset", self.preset or "baseline", "--kha-fold", self._fold]

    def environment(self) -> dict[str, str]:
        """Variables of the process while it runs."""
        return {KERNELS_VARIABLE: "triton" if self.kernels else "torch"}

    @contextmanager
    def chosen(self) -> Iterator[None]:
        """Let this process run it: the ways are chosen in each forward pass."""
        before = os.environ.get(KERNELS_VARIABLE)
        os.environ.update(self.environment())
        try:
            yield
        finally:
            os.environ.pop(KERNELS_VARIABLE)
            if before is not None:
                os.environ[KERNELS_VARIABLE] = before

    @property
    def _fold(self) -> Fold:
        return "always" if self.folded else "never"

    def missing(self, device: str) -> str | None:
        """Why it cannot run here, or None."""
        if self.kernels and device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            return "the kernels need a CUDA device, or TRITON_INTERPRET=1"
        return None


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant(STOCK, None),
        Variant("baseline", "baseline"),
        Variant("baseline/kernels", "baseline", kernels=True),
        Variant("mlp", "kha_mlp"),
        Variant("mlp/kernels", "kha_mlp", kernels=True),
        Variant("gate", "kha_gate_v"),
        Variant("gate/kernels", "kha_gate_v", kernels=True),
        Variant("linear", "kha_linear"),
        Variant("linear/kernels", "kha_linear", kernels=True),
        Variant("linear/folded", "kha_linear", folded=True),
        Variant("linear/folded+kernels", "kha_linear", kernels=True, folded=True),
    )
}
"""Every way, by name. ``stock`` comes first: the others are ratios to it."""


def runnable(names: list[str], device: str) -> tuple[list[Variant], dict[str, str]]:
    """The variants of these names that run here, and why the others do not.

    The stock layer is always among them, and first.
    """
    wanted = [VARIANTS[name] for name in dict.fromkeys([STOCK, *names])]
    skipped = {v.name: why for v in wanted if (why := v.missing(device))}
    return [variant for variant in wanted if variant.name not in skipped], skipped
