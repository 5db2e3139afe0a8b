"""What llama.cpp's converter needs to know of a tokenizer, and the way round where it does not.

``convert_hf_to_gguf.py`` tells how a byte-level BPE cuts text into words by a hash of the ids that
it makes of one fixed text. A tokenizer that was trained on somebody's own text makes ids of its
own, so that no hash of it is known, however it cuts. Where it cuts as GPT-2 does, which llama.cpp
can, the converter needs two lines that say so: :func:`lesson` writes the command that adds them.
"""

import hashlib
import json
from typing import Any

from transformers import PreTrainedTokenizerBase

TEXT = (
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n\U0001f680 (normal) \U0001f636\u200d"
    "\U0001f32b\ufe0f (multiple emojis concatenated) \u2705 \U0001f999\U0001f999 3 33 333 "
    "3333 33333 333333 3333333 33333333 3.3 3..3 3...3 \u1780\u17b6\u1793\u17cb\u178f\u17c2"
    "\u1796\u17b7\u179f\u17c1\u179f\u17a2\u17b6\u1785\U0001f601 ?\u6211\u60f3\u5728apple\u5de5"
    "\u4f5c1314151\u5929\uff5e ------======= \u043d\u0435\u0449\u043e \u043d\u0430 \u0411\u044a"
    "\u043b\u0433\u0430\u0440\u0441\u043a\u0438 ''''''```````\"\"\"\"......!!!!!!?????? I'"
    "ve been 'told he's there, 'RE you sure? 'M not sure I'll make it, 'D you like some te"
    "a? We'Ve a'lL"
)
"""What the converter hashes the ids of, letter for letter (``get_vocab_base_pre``)."""

_AS_GPT_2 = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}


def cuts_as_gpt_2(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether words and bytes are those of GPT-2, as in tokenizers of ``data prepare``."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return False
    told: dict[str, Any] = json.loads(backend.to_str())
    cutting = told["pre_tokenizer"] or {}
    return (
        told["model"]["type"] == "BPE"
        and told["normalizer"] is None
        and {name: cutting.get(name) for name in _AS_GPT_2} == _AS_GPT_2
    )


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """The converter's own hash of a tokenizer."""
    return hashlib.sha256(str(tokenizer.encode(TEXT)).encode()).hexdigest()


def lesson(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The shell command that teaches the converter a tokenizer, for a folder beside ``llama.cpp/``.

    None where words are not cut as GPT-2 does, of which nothing is known here.
    """
    if not cuts_as_gpt_2(tokenizer):
        return None
    lines = f'        if chkhsh == "{fingerprint(tokenizer)}":\\n            res = "gpt-2"\\n&'
    return f"sed -i 's|^        if res is None:|{lines}|' ../llama.cpp/conversion/base.py"
