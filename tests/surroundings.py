"""What surrounds the tests is the same everywhere; imported before what reads it at its import.

The processes that tests start inherit it.
"""

import os
import tempfile

FOREIGN = {
    # of the terminal and the CI: how wide texts are, and whether they are coloured
    *("COLUMNS", "LINES", "TERMINAL_WIDTH", "COLORTERM", "NO_COLOR", "FORCE_COLOR", "PY_COLORS"),
    *("GITHUB_ACTIONS", "TTY_COMPATIBLE", "TTY_INTERACTIVE"),
    # of a launcher, within which the tests may run
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"),
    *("CUDA_DEVICE_MAX_CONNECTIONS", "LOGLEVEL"),
    *(name for name in os.environ if name.startswith("SLURM_") and name != "SLURM_CONF"),
    # of somebody who uses the package
    *("KHA_CONFIG", "KHA_KERNELS", "KHA_MEGATRON_LAUNCH", "TRITON_INTERPRET"),
}
KEPT = tempfile.TemporaryDirectory(prefix="kha-tests-")
"""What Hugging Face's libraries keep, until this process ends."""

for name in FOREIGN:
    os.environ.pop(name, None)
os.environ |= {"LC_ALL": "C.UTF-8", "HF_HUB_OFFLINE": "1", "HF_HOME": KEPT.name}
# On AMD, MKL adds up otherwise where memory begins elsewhere: equal bits are compared on one path.
# MKL reads it once.
os.environ.setdefault("MKL_CBWR", "AVX2,STRICT")
