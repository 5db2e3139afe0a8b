"""``kha-megatron params`` and ``kha-megatron flops``."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import typer
from rich.table import Table

from kha_megatron import recipes
from kha_megatron.cli import console
from kha_megatron.cli.options import (
    AsJSON,
    HeadsFrom,
    MegatronArguments,
    RecipeName,
    warn_about_unused,
)
from kha_megatron.errors import ConfigError
from kha_megatron.heads import Knock
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.model.rules import check_arguments
from kha_megatron.plan.counts import (
    ARGUMENTS_NOT_COUNTED,
    TRAINING_FACTOR,
    Counts,
    Flops,
    compute_flops,
    count_model,
    format_like_paper,
    get_countable_model,
    get_sequence_length,
)
from kha_megatron.recipes import Recipe


def params(
    recipe: RecipeName,
    megatron: MegatronArguments = None,
    heads_from: HeadsFrom = None,
    as_json: AsJSON = False,
) -> None:
    """Count the parameters of a recipe and compute its KV cache size.

    Active parameters only include the experts that a token is routed to. Tied embeddings are
    counted once. The "KHA" row is the sum over all head mechanisms (the paper's numbers do not
    include them). We also print the overhead in FLOPs per forward pass (equations 10 to 12).

    Examples:
      kha-megatron params moe-a0.8b-6.6b
      kha-megatron params gated/15b-output-head
      kha-megatron params dense-0.6b -- --hybrid-layer-pattern '*-*-*-*-/*-'
    """
    original = recipes.get_recipe(recipe)
    chosen = _update(original, megatron or [])
    model = get_countable_model(chosen.run.model, chosen.run.arguments)
    counts = count_model(model)
    counts_without_kha = count_model(model.without_heads())
    flops = compute_flops(model, get_sequence_length(chosen.run.arguments))
    kha_share = flops.share_of_layers
    # arguments after -- can change the size of the recipe's model, but not that of the paper's
    has_paper_size = counts_without_kha == _count_without_kha(original)
    paper_counts = {}
    if has_paper_size:
        paper_counts = _compare_with_paper(chosen.paper, counts)
    if as_json:
        data = {
            "recipe": recipe,
            "knocks": str(model.kha),
            **asdict(counts),
            "without_kha": {
                "total": counts_without_kha.total,
                "active": counts_without_kha.active,
            },
            "printed": {name: asdict(count) for name, count in paper_counts.items()},
            "kha_share_of_layers": kha_share,
            "note": chosen.note,
        }
        console.print_json(data)
        return
    console.out.print(f"{chosen.name}: {chosen.description}", markup=False)
    console.out.print(_count_table(counts, counts_without_kha, has_paper_size, paper_counts))
    kha_cache = counts.cache_per_layer - counts_without_kha.cache_per_layer
    console.out.print(
        f"KV cache: {counts.cache_bytes:,} bytes per token in bf16 ({model.num_layers} layers x "
        f"{counts.cache_per_layer:,} values, KHA: {kha_cache:+,})"
    )
    if model.kha.mechanisms:
        remark = " (0 % after `convert fold`)" if _folds_away(model.kha) else ""
        console.out.print(f"FLOPs: KHA adds {kha_share:.2%} to the layers{remark}")
    if chosen.note:
        console.out.print(f"Note: {chosen.note}", markup=False)


def _update(recipe: Recipe, words: Sequence[str]) -> Recipe:
    """Return the recipe with the user's arguments. Raises ConfigError for an impossible model."""
    warn_about_unused(words, used=ARGUMENTS_NOT_COUNTED)
    updated = recipe.updated(words)
    check_arguments(updated.run.arguments, None, updated.run.kha)
    return updated


def _count_without_kha(recipe: Recipe) -> Counts | None:
    """Count the model of a recipe without its head mechanisms. None if that is not possible."""
    try:
        model = get_countable_model(recipe.run.model, recipe.run.arguments)
    except ConfigError:
        return None
    return count_model(model.without_heads())


def _folds_away(kha: HeadsConfig) -> bool:
    """Whether ``convert fold`` leaves a stock model, i.e. there is only KHA-Linear."""
    variants = set(kha.variants.values())
    return variants == {"linear"} and len(kha.mechanisms) == 1


@dataclass(frozen=True, kw_only=True)
class _PaperCount:
    """A parameter count in the paper."""

    paper: str
    ours: str
    how: str
    """How our count compares to the one in the paper, see :func:`format_like_paper`."""

    def __str__(self) -> str:
        if self.ours == self.paper:
            return f"{self.paper} ({self.how})"
        return f"{self.paper} ({self.ours}: {self.how})"


def _compare_with_paper(
    paper: Mapping[str, str | float],
    counts: Counts,
) -> dict[str, _PaperCount]:
    """Compare the counts that are in the paper, which do not include KHA."""
    knock = counts.mechanisms.get(Knock.name, 0)
    numbers = {"total": counts.total - knock, "active": counts.active - knock}
    compared = {}
    for name, number in numbers.items():
        if name in paper:
            published = str(paper[name])
            ours, how = format_like_paper(number, published)
            compared[name] = _PaperCount(paper=published, ours=ours, how=how)
    return compared


def _count_table(
    counts: Counts,
    counts_without_kha: Counts,
    has_paper_size: bool,
    paper_counts: Mapping[str, _PaperCount],
) -> Table:
    columns = ["with KHA", "without"]
    if has_paper_size:
        columns.append("paper")
    table = console.number_table("parameters", *columns)

    def add_row(name: str, with_kha: int, without_kha: int) -> None:
        paper = str(paper_counts.get(name, "-"))
        cells = [f"{with_kha:,}", f"{without_kha:,}", paper]
        table.add_row(name, *cells[: len(columns)])

    add_row("total", counts.total, counts_without_kha.total)
    add_row("active", counts.active, counts_without_kha.active)
    add_row("KHA", counts.kha, 0)
    knock = counts.mechanisms.get(Knock.name, 0)
    if len(counts.mechanisms) > 1 or knock != counts.kha:
        for name, number in counts.mechanisms.items():
            add_row(f"  {name}", number, 0)
    return table


def count_flops(
    recipe: RecipeName,
    megatron: MegatronArguments = None,
    seq: Annotated[
        int | None, typer.Option(min=1, max=2**31, help="Sequence length (default: set by recipe).")
    ] = None,
    heads_from: HeadsFrom = None,
    as_json: AsJSON = False,
) -> None:
    """Count the FLOPs per sequence and the overhead of KHA.

    Matrix multiplications are counted as in equations 10 to 12 of the paper, so the causal mask is
    ignored. The backward pass takes twice as many FLOPs as the forward pass. For MoH, the "on
    paper" column shows how much you would save if kernels skipped the heads that are not selected.

    Examples:
      kha-megatron flops moe-a0.8b-6.6b --seq 4096
      kha-megatron flops equation12
    """
    chosen = _update(recipes.get_recipe(recipe), megatron or [])
    model = get_countable_model(chosen.run.model, chosen.run.arguments)
    length = seq or get_sequence_length(chosen.run.arguments)
    flops = compute_flops(model, length)
    if as_json:
        terms = asdict(flops)
        projections = terms.pop("skippable_projections")
        scores = terms.pop("skippable_scores")
        data = {
            "recipe": recipe,
            "seq": length,
            "forward": terms | {"total": flops.forward},
            "backward": {"total": 2 * flops.forward, "kha": 2 * flops.kha},
            "training": {"total": flops.training, "kha": TRAINING_FACTOR * flops.kha},
            "kha_share_of": {
                "layers": flops.share_of_layers,
                "attention": flops.share_of_attention,
            },
            "spared_on_paper": {"forward": {"projections": projections, "scores": scores}},
        }
        console.print_json(data)
        return
    console.out.print(f"{chosen.name}: {chosen.description} (KHA: {model.kha})", markup=False)
    console.out.print(_flops_table(flops, length))
    console.out.print(
        f"KHA adds {flops.share_of_layers:.2%} to the layers and {flops.share_of_attention:.2%} to "
        "attention."
    )


def _flops_table(flops: Flops, length: int) -> Table:
    skippable = flops.skippable_projections + flops.skippable_scores
    columns = ["forward", "backward", "training"]
    if skippable:
        columns.append("on paper")
    table = console.number_table(f"TFLOPs of {length:,} tokens", *columns)

    def add_row(name: str, forward: float, skippable: float = 0) -> None:
        if not forward:
            return
        backward = 2 * forward
        training = forward + backward
        savings = f"-{_in_tera(skippable)}" if skippable else "-"
        cells = [_in_tera(forward), _in_tera(backward), _in_tera(training), savings]
        table.add_row(name, *cells[: len(columns)])

    add_row("attention projections", flops.projections, flops.skippable_projections)
    add_row("attention scores", flops.scores, flops.skippable_scores)
    add_row("MLP or routed experts", flops.mlp)
    add_row("router", flops.router)
    add_row("KHA", flops.kha)
    add_row("multi-token prediction", flops.prediction)
    add_row("output layer", flops.logits)
    add_row("all", flops.forward, skippable)
    return table


def _in_tera(number: float) -> str:
    return f"{number / 1e12:,.4f}"
