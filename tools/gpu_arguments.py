"""Whether Megatron takes the command line of every case, asked without a GPU.

Prints a JSON object: by the name of the case, empty or why it was refused. Where Transformer Engine
cannot be imported, its cases are only parsed and checked, not turned into a configuration.
"""

import json
import os
import sys
import warnings

from gpu_cases import CASES

from kha_megatron import cpu


def main() -> None:
    """Parse, check and turn into a ``TransformerConfig``, as the entry point does."""
    warnings.simplefilter("ignore")
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"} | cpu.ENVIRONMENT
    cpu.install(despite_cuda=True, hide_cuda_only=False, quiet=True)
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.training.argument_utils import core_transformer_config_from_args
    from megatron.training.arguments import parse_args, validate_args

    from kha_megatron.training.arguments import add_kha_arguments, check_args, kha_from_args

    refused = {}
    for case in CASES:
        data = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "4096"]
        sys.argv = ["training", *case.recipe.command_line(data)]
        try:
            args = parse_args(add_kha_arguments)
            check_args(args)
            kha_from_args(args)
            if HAVE_TE or "te" not in case.needs:
                validate_args(args, {})
                core_transformer_config_from_args(args)
            refused[case.name] = ""
        except (Exception, SystemExit) as error:  # argparse exits
            refused[case.name] = f"{type(error).__name__}: {error}"
    print(json.dumps(refused))


if __name__ == "__main__":
    main()
