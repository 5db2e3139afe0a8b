"""Our entry point, with the class of the attention and the time of every step on its output.

    python tools/timed_training.py [--stock] [--record FOLDER] ARGUMENTS    (or under torchrun)

ARGUMENTS are those of `-m kha_megatron.training`. With --stock, layers are Megatron's own and
nothing of ours is in the model, while the rest of the run stays as it is. With --record, the first
weights, the tokens and labels of every step and the sizes go to FOLDER for `plain_training.py`: of
one rank, without parallelism, one microbatch a step. `bench_step.py`, `bench_cpu.py` and
`bench_instruments.py` run it.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

SECONDS, PROCESSOR, ATTENTION = "step-seconds", "step-processor", "step-attention"
LOSS = "step-loss"
"""What the lines begin with that are meant for a program."""

SETTINGS, WEIGHTS, BATCHES = "settings.json", "weights.pt", "batches.pt"
"""What a recorded run leaves."""


def main() -> None:
    """Train."""
    stock = "--stock" in sys.argv
    if stock:
        sys.argv.remove("--stock")
    record = None
    if "--record" in sys.argv:
        at = sys.argv.index("--record")
        record = Path(sys.argv[at + 1])
        del sys.argv[at : at + 2]
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
    batches = _recorded_batches(pretrain) if record else []
    step = training.train_step
    said = False

    def timed(forward_step, data, model, *args, **kwargs):
        nonlocal said
        if record and not said:
            _record_start(record, model[0])
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
            for loss in result[0].values():  # none in a pipeline's first stages
                print(f"{LOSS} {float(loss)}", flush=True)
        said = True
        return result

    training.train_step = timed
    pretrain.run(time.time())
    if record:
        torch.save(batches, record / BATCHES)


def _recorded_batches(pretrain: Any) -> list[Any]:
    """Tokens and labels of every microbatch from now on."""
    batches: list[Any] = []
    read = pretrain._get_batch

    def reading(*args: Any) -> Any:
        batch = read(*args)
        batches.append((batch[0].clone(), batch[1].clone()))
        return batch

    pretrain._get_batch = reading
    return batches


def _record_start(folder: Path, model: Any) -> None:
    import torch
    from megatron.training import get_args

    folder.mkdir(parents=True, exist_ok=True)
    plain = {n: v for n, v in vars(get_args()).items() if isinstance(v, int | float | str)}
    (folder / SETTINGS).write_text(json.dumps(plain))
    weights = {
        name.removeprefix("module."): value.detach().clone()
        for name, value in model.state_dict().items()
        if isinstance(value, torch.Tensor)
    }
    torch.save(weights, folder / WEIGHTS)


if __name__ == "__main__":
    main()
