"""``ask_vllm.py JOBS.json ANSWERS.json``: run models in vLLM, one engine after another.

Runs in an environment with vLLM and without Megatron. A job has

- ``folder``, ``engine`` and ``adapter``: the model, arguments of ``vllm.LLM``, a LoRA directory;
- ``prompts``: lists of token ids, requested together ``rounds`` times;
- ``reload``: a directory with other weights, which are loaded between two rounds.

An answer has ``tokens`` and ``logprobs`` of each round and prompt, ``prompt_logprobs`` of the first
round (vLLM ignores adapters there), the ``cached`` tokens of the last round; or an ``error``.
"""

import gc
import json
import sys
import traceback
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

TOKENS = 16


def main(jobs, answers):
    found = []
    for job in json.loads(Path(jobs).read_text()):
        try:
            found.append(ask(**job))
        except Exception as error:
            traceback.print_exc()
            found.append({"error": f"{type(error).__name__}: {error}"})
        Path(answers).write_text(json.dumps(found))
        gc.collect()


def load_weights(model, folder):
    """Replace the weights of a running model, as trainers for reinforcement learning do."""
    model.load_weights(read_tensors(folder))


def read_tensors(folder):
    """Yield the names and tensors of a model one by one."""
    from safetensors import safe_open

    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            names = opened.keys()
            for name in names:
                yield name, opened.get_tensor(name)


@contextmanager
def plain_linear_layers():
    """Keep the weights of linear layers, which vLLM replaces by packed ones on CPUs (not GPUs)."""
    from vllm import _custom_ops

    supported = _custom_ops._supports_onednn
    _custom_ops._supports_onednn = False
    yield
    _custom_ops._supports_onednn = supported


def ask(folder, prompts, engine, rounds=1, adapter=None, reload=None):
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.lora.request import LoRARequest

    settings = {
        "dtype": "float32",
        "max_model_len": 256,
        "block_size": 32,
        "max_num_seqs": len(prompts),
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "seed": 0,
    }
    with plain_linear_layers() if reload else nullcontext():
        llm = LLM(model=folder, **settings | engine)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    lora = LoRARequest("adapter", 1, adapter) if adapter else None
    try:
        results = []
        for index in range(rounds):
            if index and reload:
                llm.apply_model(partial(load_weights, folder=reload))
                llm.reset_prefix_cache()
            asked = SamplingParams(
                temperature=0,
                max_tokens=TOKENS,
                logprobs=1,
                # With prompt_logprobs, vLLM does not use the cache.
                prompt_logprobs=None if index or adapter else 0,
                ignore_eos=True,
                detokenize=False,
            )
            results.append(
                llm.generate(
                    inputs,
                    asked,
                    use_tqdm=False,
                    lora_request=lora,
                )
            )
    finally:
        del llm
        cleanup_dist_env_and_memory()
    first = zip(results[0], prompts, strict=True)
    return {
        "tokens": [[list(o.outputs[0].token_ids) for o in outputs] for outputs in results],
        "logprobs": [
            [chosen(o.outputs[0].logprobs, o.outputs[0].token_ids) for o in outputs]
            for outputs in results
        ],
        "prompt_logprobs": []
        if adapter
        else [chosen(o.prompt_logprobs[1:], p[1:]) for o, p in first],
        "cached": sum(o.num_cached_tokens or 0 for o in results[-1]),
    }


def chosen(rows, tokens):
    return [row[token].logprob for row, token in zip(rows, tokens, strict=True)]


if __name__ == "__main__":  # spawned workers import this file
    main(*sys.argv[1:])
