"""Check the arguments of a training run with Megatron's own parser, without starting it.

``python -m kha_megatron.training.check ARGUMENTS`` prints one line and exits with 2 if the run
would refuse its arguments. Neither a GPU nor the data is needed. The environment variable
``WORLD_SIZE`` is the number of ranks.
"""

import argparse
import contextlib
import io
import sys
import traceback

from kha_megatron.errors import KHAError, in_one_line

_NEEDS_ENGINE = {"apply_rope_fusion": False, "fp8": None, "moe_permute_fusion": False}
"""Options that are refused without Transformer Engine, which the machine that submits a job may
lack."""


def find_mistake(words: list[str]) -> str | None:
    """Return why training would refuse a command line, or None."""
    from kha_megatron.mcore import cpu
    from kha_megatron.mcore.compat import megatron_imports

    cpu.install(despite_cuda=True, quiet=True)
    with megatron_imports():
        from megatron.training.arguments import parse_args

        from kha_megatron.training.arguments import add_kha_arguments

    sys.argv[1:] = words
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            args = parse_args(add_kha_arguments)
    except SystemExit:  # raised by argparse
        return printed.getvalue().rstrip().rpartition("error: ")[2]
    except Exception as error:  # raised by the type of an argument, which argparse does not catch
        return _describe(error)
    return _find_contradiction(args)


def _find_contradiction(args: argparse.Namespace) -> str | None:
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.training.argument_utils import core_transformer_config_from_args
    from megatron.training.arguments import validate_args

    from kha_megatron.training.arguments import (
        check_middle_stages,
        check_options,
        set_layer_pattern,
    )

    try:
        check_options(args)
        set_layer_pattern(args)
        if not args.use_checkpoint_args:
            with contextlib.redirect_stdout(io.StringIO()):
                validate_args(args, {"tokenizer_type": "NullTokenizer"})
                check_middle_stages(args)
                if not HAVE_TE:
                    vars(args).update(_NEEDS_ENGINE)
                core_transformer_config_from_args(args)  # checks its fields
    except KHAError as error:
        return str(error)
    except ImportError:  # the machine that submits a job may lack a package
        return None
    except Exception as error:
        return _describe(error)
    return None


def _describe(error: Exception) -> str:
    if isinstance(error, AssertionError) and not str(error):
        condition = traceback.extract_tb(error.__traceback__)[-1].line or ""
        return f"Megatron requires: {condition.removeprefix('assert ')}"
    is_message = isinstance(error, AssertionError | ValueError | RuntimeError)
    return in_one_line(error) if is_message else repr(error)


if __name__ == "__main__":
    if mistake := find_mistake(sys.argv[1:]):
        print(f"error: {mistake}", file=sys.stderr)
        sys.exit(2)
