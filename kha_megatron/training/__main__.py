"""Entry point: ``torchrun --nproc-per-node 8 -m kha_megatron.training --kha-preset kha_mlp ...``.

Exit code 2 and one line on stderr for input that cannot be honoured; 17, as in Megatron, when NaN
or infinity stopped the training.
"""

import os
import sys
import time

from torch.distributed.elastic.multiprocessing.errors import record

from kha_megatron.errors import KHAError

PROGRAM_START = time.time()


@record
def main() -> None:
    """Choose the device, which must happen before Megatron is imported, and train."""
    from kha_megatron.training.arguments import choose_device

    try:
        choose_device(sys.argv)
        from kha_megatron.mcore.compat import megatron_imports

        with megatron_imports():
            from kha_megatron.training.pretrain import run

        run(PROGRAM_START)
    except KHAError as error:
        # one rank of each machine: a file may be missing on one machine only
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
