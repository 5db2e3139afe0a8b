"""Run Megatron models for conversions without importing Megatron for each of them."""

import tempfile
from pathlib import Path

import torch

from kha_megatron.conversion import megatron_model
from tests import entry

run_in_new_process = megatron_model.run_megatron
"""The function that users call. It takes 7 s to import Megatron."""

_PROGRAM = """
import sys, torch
from kha_megatron.conversion import megatron_model
try:
    answer = megatron_model._run_here(*torch.load(sys.argv[1], weights_only=False))
except Exception as error:
    answer = error
torch.save(answer, sys.argv[2])
"""


def run_in_fork(iteration, tokens, *, rounded_to):
    """Do the same in a fork of a process that has imported Megatron."""
    with tempfile.TemporaryDirectory() as folder:
        request, answer_file = str(Path(folder, "request")), str(Path(folder, "answer"))
        torch.save((iteration, tokens, rounded_to), request)
        run = entry.run([request, answer_file], program=_PROGRAM)
        assert run.codes == [0], run.output
        answer = torch.load(answer_file, weights_only=False)
    if isinstance(answer, Exception):
        raise answer
    return answer
