"""Entry point: ``torchrun --nproc-per-node 8 -m kha_megatron.training --kha-preset kha_mlp ...``.

The exit code is 2 for invalid input, which is reported in one line on stderr, and 17 (as in
Megatron) if training was stopped because of NaN or infinity.
"""

import os
import sys
import time

from torch.distributed.elastic.multiprocessing.errors import record

from kha_megatron.errors import KHAError

PROGRAM_START = time.time()


@record
def main() -> None:
    """Select the device, which has to happen before Megatron is imported, and train."""
    from kha_megatron.training.arguments import choose_device

    try:
        choose_device(sys.argv)
        from kha_megatron.mcore.compat import megatron_imports

        with megatron_imports():
            from kha_megatron.training.pretrain import run

        run(PROGRAM_START)
    except KHAError as error:
        # print once per machine, because a file may be missing on one of them only
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
