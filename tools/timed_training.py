"""Our entry point, with the class of the attention and the seconds of every step on its output.

    python tools/timed_training.py [--stock] ARGUMENTS    (or under torchrun)

ARGUMENTS are those of `-m kha_megatron.training`. With --stock, layers are Megatron's own and
nothing of ours is in the model, while the rest of the run stays as it is. `bench_step.py` and
`bench_instruments.py` run it.
"""

import sys
import time

SECONDS, PROCESSOR, ATTENTION = "step-seconds", "step-processor", "step-attention"
"""What the lines begin with that are meant for a program."""


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
    said = False

    def timed(forward_step, data, model, *args, **kwargs):
        nonlocal said
        torch.cuda.synchronize()
        start, used = time.perf_counter(), time.process_time()
        result = step(forward_step, data, model, *args, **kwargs)
        torch.cuda.synchronize()
        seconds, used = time.perf_counter() - start, time.process_time() - used
        if torch.distributed.get_rank() == 0:
            if not said:
                modules = (module for chunk in model for module in chunk.modules())
                kinds = {
                    type(module).__name__ for module in modules if isinstance(module, Attention)
                }
                print(f"\n{ATTENTION} {' '.join(sorted(kinds))}", flush=True)
            print(f"\n{SECONDS} {seconds}\n{PROCESSOR} {used}", flush=True)
        said = True
        return result

    training.train_step = timed
    pretrain.run(time.time())


if __name__ == "__main__":
    main()
