"""Save a GGUF model as a Hugging Face directory with float32 weights.

    python examples/gguf_to_hf.py MODEL.gguf OUT

transformers 5.22 and newer keep quantized GGUF weights packed and refuse to save them, unless
``dequantize`` is set. Requires ``pip install gguf``.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

file, out = map(Path, sys.argv[1:])
model = AutoModelForCausalLM.from_pretrained(
    file.parent,
    gguf_file=file.name,
    quantization_config=GgufConfig(dequantize=True),
    dtype=torch.float32,
)
model.save_pretrained(out)
tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
tokenizer.save_pretrained(out)
