"""Run the training entry point on the CPU with the double of Transformer Engine."""

import os
import sys

from tests.transformer_engine import BLACKWELL, HOPPER, install

if __name__ == "__main__":
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    install(BLACKWELL if "mxfp8" in sys.argv else HOPPER)
    from kha_megatron.training.__main__ import main

    main()
