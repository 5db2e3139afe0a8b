"""``ask_llama_cpp.py MODEL.gguf TOKENS VOCABULARY PROMPT``: what llama.cpp makes of a prompt.

Its server, in this process, answers as JSON: how many tokens the prompt has, the likeliest next
ones, and the log-probabilities of the whole vocabulary after the prompt.
"""

import json
import sys
from urllib.request import Request, urlopen

from xllamacpp import CommonParams, Server, ggml_type, llama_flash_attn_type

_, model, count, vocabulary, prompt = sys.argv
settings = CommonParams()
settings.model.path = model
settings.n_ctx, settings.n_parallel, settings.cpuparams.n_threads = 128, 1, 1
settings.cache_type_k = settings.cache_type_v = ggml_type.GGML_TYPE_F32
settings.flash_attn_type = llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
server = Server(settings)
asked = {
    "prompt": prompt,
    "n_predict": int(count),
    "temperature": 0.0,
    "n_probs": int(vocabulary),
    "return_tokens": True,
    "cache_prompt": False,
    "ignore_eos": True,
}
body = json.dumps(asked).encode()
request = Request(
    f"{server.listening_address}/completion", body, {"Content-Type": "application/json"}
)
with urlopen(request, timeout=60) as answered:
    answer = json.load(answered)
first = {e["id"]: e["logprob"] for e in answer["completion_probabilities"][0]["top_logprobs"]}
found = {
    "prompt": answer["tokens_evaluated"],
    "greedy": answer["tokens"],
    "first": [first.get(token) for token in range(int(vocabulary))],
}
print("\n" + json.dumps(found))
