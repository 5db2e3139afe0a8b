"""``kha-megatron verify``: compare two checkpoints."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kha_megatron.cli import console
from kha_megatron.cli.options import AsJSON, HeadsFrom, Workers

if TYPE_CHECKING:
    from kha_megatron.conversion.verify import Verification

_EXAMPLES = 5
"""Maximum number of names in a row of the table."""


def compare_models(
    one: Annotated[Path, typer.Argument(help="Megatron checkpoint or Hugging Face model.")],
    other: Annotated[Path, typer.Argument(help="Checkpoint or model to compare with.")],
    logits: Annotated[bool, typer.Option(help="Compare logits if memory allows.")] = True,
    workers: Workers = None,
    heads_from: HeadsFrom = None,
    as_json: AsJSON = False,
) -> None:
    """Compare the tensors, settings and logits of two checkpoints.

    For Hugging Face models, decoding with a KV cache is also compared with one forward pass.

    You can also compare a model with its folded version, or an upcycled model with the original.
    The exit code is 1 if the models differ.

    Examples:
      kha-megatron verify ckpt/iter_0001000 my-model
      kha-megatron verify my-kha-model my-qwen3 --json
      kha-megatron verify ckpt/a ckpt/b --no-logits
    """
    if logits:
        from kha_megatron.mcore.compat import check_version

        check_version()
    from kha_megatron.conversion.verify import Pair

    with console.log.status("Comparing tensors and logits"):
        verification = Pair.open(one, other).compare(logits=logits, workers=workers)
    conclude(verification, as_json)


def conclude(
    verification: "Verification | None",
    as_json: bool,
    *,
    facts: Mapping[str, str] | None = None,
    values: Mapping[str, Any] | None = None,
) -> None:
    """Print the result of a command. Exits with code 1 if the verification failed.

    Args:
        facts: Extra rows for the table.
        values: Extra fields for the JSON output. If there are any, the verification is nested under
            the key ``verification``.
    """
    if as_json:
        console.print_json(_as_data(verification, values))
    else:
        rows = dict(facts or {})
        if verification is None:
            rows["verified"] = "no"
        else:
            rows |= _describe_tensors(verification)
            rows |= _describe_logits(verification)
        console.print_facts(rows)
    if verification is not None and not verification.agrees:
        differences = []
        for name, description in _find_differences(verification).items():
            differences.append(f"{name}: {description}")
        console.error(f"The two models differ: {'; '.join(differences)}.")
        raise typer.Exit(1)


def _as_data(
    verification: "Verification | None",
    values: Mapping[str, Any] | None,
) -> dict[str, Any] | None:
    """Return the JSON output of :func:`conclude`."""
    verification_data = None
    if verification is not None:
        verification_data = asdict(verification)
        verification_data["agrees"] = verification.agrees
    if values:
        return {**values, "verification": verification_data}
    return verification_data


def _describe_tensors(verification: "Verification") -> dict[str, str]:
    """Return table rows about the tensors, and about all differences between the models."""
    from kha_megatron.conversion.verify import HeadAdjustment

    tensors = verification.tensors
    compared = str(tensors.tensors)
    if tensors.remark is not HeadAdjustment.NONE:
        compared += f", {tensors.remark}"
    rows = {"tensors compared": compared}
    rows |= _find_differences(verification)
    rows |= not_finite(tensors.not_finite)
    if tensors.agrees and not tensors.rounded:
        rows[""] = "all equal"  # continues the row above
    elif tensors.agrees:
        names = ", ".join(tensors.rounded[:_EXAMPLES])
        rows["equal after rounding"] = f"{len(tensors.rounded)}, e.g. {names}"
    return rows


def _describe_logits(verification: "Verification") -> dict[str, str]:
    logits = verification.logits
    if logits is None:
        return {"logits": "not compared"}
    difference = f"largest difference {logits.max_difference:.2e}"
    rows = {
        "logits": f"{difference}, mean {logits.mean_difference:.2e}",
        "KL divergence": f"{logits.kl:.2e} nats",
    }
    if verification.decoding:
        largest = max(decoding.max_difference for decoding in verification.decoding)
        rows["decoding with a cache"] = f"largest difference {largest:.2e}"
    rows["same most likely token"] = f"{logits.argmax:.2%} of {logits.tokens}"
    return rows


def _find_differences(verification: "Verification") -> dict[str, str]:
    """Return a table row for each kind of difference, or {} if the models agree."""
    logits = verification.logits
    tensors = verification.tensors
    names_by_problem = {
        "missing tensors": tensors.missing,
        "unexpected tensors": tensors.unexpected,
        "mismatched tensors": tensors.mismatched,
        "different tensors": tensors.different,
    }
    rows = {}
    for problem, names in names_by_problem.items():
        if names:
            rows[problem] = f"{len(names)}, e.g. {', '.join(names[:_EXAMPLES])}"
    if verification.settings:
        rows["different settings"] = "; ".join(verification.settings[:_EXAMPLES])
    if logits is not None and not logits.agrees:
        difference = f"{logits.max_difference:.2e} exceeds {logits.limit:g}"
        if logits.first_layer is not None:
            difference += f" starting at layer {logits.first_layer}"
        rows["different logits"] = difference
    for decoding in verification.decoding:
        if not decoding.agrees:
            rows["different decoding with a cache"] = (
                f"{decoding.max_difference:.2e} exceeds {decoding.limit:g} in {decoding.path}"
            )
    return rows


def not_finite(tensors: Mapping[str, int]) -> dict[str, str]:
    """Return a table row for tensors with NaN or infinite values, or {} if all are finite."""
    if not tensors:
        return {}
    counts = [f"{name} {count:,}" for name, count in tensors.items()]
    examples = ", ".join(counts[:_EXAMPLES])
    return {"NaN or infinite": f"in {len(counts)} tensors: {examples}"}
