"""Training entry point. Example::

    torchrun --nproc-per-node 8 -m kha_megatron.training --kha-preset kha_mlp ...

Exits with 2 if the input is invalid (with a one-line error on stderr) and with 17, like Megatron,
if it finds NaN or Inf.
"""

import os
import sys
import time

from torch.distributed.elastic.multiprocessing.errors import record

from kha_megatron.errors import KHAError

PROGRAM_START = time.time()


@record
def main() -> None:
    """Select the device, then train. The device must be selected before Megatron is imported."""
    from kha_megatron.training.arguments import choose_device

    try:
        choose_device(sys.argv)
        from kha_megatron.mcore.compat import megatron_imports

        with megatron_imports():
            from kha_megatron.training.pretrain import run

        run(PROGRAM_START)
    except KHAError as error:
        # once per node, since e.g. a file may be missing on only one of them
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
