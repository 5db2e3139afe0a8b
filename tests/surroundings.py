"""Give tests and the processes that they start the same environment everywhere.

Imported before the modules that read the environment when they are imported.
"""

import os
import tempfile

FOREIGN = {
    # terminal and CI: width and colours
    *("COLUMNS", "LINES", "TERMINAL_WIDTH", "COLORTERM", "NO_COLOR", "FORCE_COLOR", "PY_COLORS"),
    *("GITHUB_ACTIONS", "TTY_COMPATIBLE", "TTY_INTERACTIVE"),
    # a launcher that the tests may run in
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"),
    *("CUDA_DEVICE_MAX_CONNECTIONS", "LOGLEVEL"),
    *(name for name in os.environ if name.startswith("SLURM_") and name != "SLURM_CONF"),
    # a user of the package
    *("KHA_CONFIG", "KHA_KERNELS", "KHA_MEGATRON_LAUNCH", "TRITON_INTERPRET"),
}
CACHE = tempfile.TemporaryDirectory(prefix="kha-tests-")
"""Cache of Hugging Face's libraries, deleted when this process ends."""

for name in FOREIGN:
    os.environ.pop(name, None)
os.environ |= {"LC_ALL": "C.UTF-8", "HF_HUB_OFFLINE": "1", "HF_HOME": CACHE.name}
# On AMD, MKL's order of sums depends on the alignment of memory. MKL reads the variable once.
os.environ.setdefault("MKL_CBWR", "AVX2,STRICT")
