"""Run our entry point and print the class of the attention and the time of every step.

    python tools/timed_training.py [--stock] ARGUMENTS    (or under torchrun)

ARGUMENTS are those of ``-m kha_megatron.training``. With --stock, the layers are Megatron's own and
the rest of the run stays the same.
"""

import sys
import time

SECONDS, ATTENTION = "step-seconds", "step-attention"
"""First words of the lines for ``bench_step.py``."""


def main() -> None:
    """Train."""
    stock = "--stock" in sys.argv
    if stock:
        sys.argv.remove("--stock")
    from kha_megatron.training.arguments import choose_device

    choose_device(sys.argv)
    import torch
    from megatron.core.transformer.attention import Attention
    from megatron.training import training
    from megatron.training.models.gpt import default_layer_spec

    from kha_megatron.mcore import building
    from kha_megatron.training import pretrain

    if stock:
        building.kha_layer_spec = lambda config, kha, vp_stage=None: default_layer_spec(
            config, vp_stage
        )
    step = training.train_step

    def timed(forward_step, data, model, *args, **kwargs):
        torch.cuda.synchronize()
        start = time.perf_counter()
        result = step(forward_step, data, model, *args, **kwargs)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        if torch.distributed.get_rank() == 0:
            modules = [module for chunk in model for module in chunk.modules()]
            kinds = {type(module).__name__ for module in modules if isinstance(module, Attention)}
            print(f"\n{ATTENTION} {' '.join(sorted(kinds))}\n{SECONDS} {seconds}", flush=True)
        return result

    training.train_step = timed
    pretrain.run(time.time())


if __name__ == "__main__":
    main()
