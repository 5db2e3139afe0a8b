"""``kha-megatron params`` and ``kha-megatron flops``."""

from dataclasses import asdict
from typing import Annotated

import typer

from kha_megatron import recipes
from kha_megatron.cli import console
from kha_megatron.cli.options import AsJSON, HeadsFrom, MegatronArguments, RecipeName
from kha_megatron.heads import Knock
from kha_megatron.heads.config import HeadsConfig
from kha_megatron.plan.counts import (
    compute_flops,
    count_model,
    format_like_paper,
    get_countable_model,
)


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
    chosen = original.updated(megatron or [])
    model, kha = get_countable_model(chosen.run.model), chosen.run.kha
    counts, bare = count_model(model, kha), count_model(model, HeadsConfig())
    is_same = bare == count_model(get_countable_model(original.run.model), HeadsConfig())
    knock = counts.mechanisms.get(Knock.name, 0)
    plain = {"total": bare.total, "active": bare.active}
    printed = {name: str(chosen.paper[name]) for name in plain if is_same and name in chosen.paper}
    share = compute_flops(model, kha, chosen.run.arguments["seq_length"]).share_of_layers
    paper = {
        name: format_like_paper(getattr(counts, name) - knock, x) for name, x in printed.items()
    }
    if as_json:
        beside = {
            name: {"paper": printed[name], "ours": ours, "how": how}
            for name, (ours, how) in paper.items()
        }
        data = {"recipe": recipe, "knocks": str(kha), **asdict(counts), "without_kha": plain}
        data |= {"printed": beside, "kha_share_of_layers": share, "note": chosen.note}
        console.print_json(data)
        return
    columns = ("with KHA", "without", *["paper"] * is_same)
    table = console.number_table("parameters", *columns)
    for name, own in plain.items():
        ours, how = paper.get(name, ("", ""))
        if ours and ours != printed[name]:
            ours, how = printed[name], f"{ours}: {how}"
        note = f"{ours} ({how})" if ours else "-"
        table.add_row(name, f"{getattr(counts, name):,}", f"{own:,}", *[note] * is_same)
    table.add_row("KHA", f"{counts.kha:,}", "0", *["-"] * is_same)
    if len(counts.mechanisms) > 1 or knock != counts.kha:
        for name, own in counts.mechanisms.items():
            table.add_row(f"  {name}", f"{own:,}", "0", *["-"] * is_same)
    console.out.print(f"{chosen.name}: {chosen.description}", markup=False)
    console.out.print(table)
    change = counts.cache_per_layer - bare.cache_per_layer
    console.out.print(
        f"KV cache: {counts.cache_bytes:,} bytes per token in bf16 ({model.num_layers} layers x "
        f"{counts.cache_per_layer:,} values, KHA: {change:+,})"
    )
    if kha.mechanisms:
        linear = set(kha.variants.values()) == {"linear"} and len(kha.mechanisms) == 1
        folding = " (0 % after `convert fold`)" if linear else ""
        console.out.print(f"FLOPs: KHA adds {share:.2%} to the layers{folding}")
    if chosen.note:
        console.out.print(f"Note: {chosen.note}", markup=False)


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
    chosen = recipes.get_recipe(recipe).updated(megatron or [])
    model, kha = get_countable_model(chosen.run.model), chosen.run.kha
    length = seq or chosen.run.arguments["seq_length"]
    result = compute_flops(model, kha, length)
    shares = {"layers": result.share_of_layers, "attention": result.share_of_attention}
    saved = {"projections": result.skippable_projections, "scores": result.skippable_scores}
    if as_json:
        parts = {name: n for name, n in asdict(result).items() if not name.startswith("skippable_")}
        data = {
            "recipe": recipe,
            "seq": length,
            "forward": parts | {"total": result.forward},
            "backward": {"total": 2 * result.forward, "kha": 2 * result.kha},
            "training": {"total": 3 * result.forward, "kha": 3 * result.kha},
            "kha_share_of": shares,
            "spared_on_paper": {"forward": saved},
        }
        console.print_json(data)
        return
    columns = ("forward", "backward", "training", *(["on paper"] if any(saved.values()) else []))
    table = console.number_table(f"TFLOPs of {length:,} tokens", *columns)
    named = {
        "attention projections": (result.projections, saved["projections"]),
        "attention scores": (result.scores, saved["scores"]),
        "MLP or routed experts": (result.mlp, 0),
        "router": (result.router, 0),
        "KHA": (result.kha, 0),
        "multi-token prediction": (result.prediction, 0),
        "output layer": (result.logits, 0),
        "all": (result.forward, sum(saved.values())),
    }
    for name, (forward, less) in named.items():
        if forward:
            row = [f"{times * forward / 1e12:,.4f}" for times in (1, 2, 3)]
            row.append(f"-{less / 1e12:,.4f}" if less else "-")
            table.add_row(name, *row[: len(columns)])
    console.out.print(f"{chosen.name}: {chosen.description} (KHA: {kha})", markup=False)
    console.out.print(table)
    console.out.print(
        f"KHA adds {shares['layers']:.2%} to the layers and {shares['attention']:.2%} to attention."
    )
