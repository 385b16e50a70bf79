"""`specbranch models`: the models and pairs known by name, and fetching them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from specbranch.errors import ModelError, unknown
from specbranch.pairs import DEFAULT_PAIR, PAIRS, Pair, card

if TYPE_CHECKING:
    from specbranch.models.families.family import Family

ModelRow = dict[str, Any]


@click.group(invoke_without_command=True)
@click.pass_context
def models(context: click.Context) -> None:
    """List the models and pairs known by name, or fetch one into the cache folder. Without a command it lists them."""
    if context.invoked_subcommand is None:
        context.invoke(list_models)


@models.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list; `kind` distinguishes models and pairs.")
def list_models(as_json: bool = False) -> None:
    """Show each known model and pair: size, licence, path, and a draft's layers and agreement with its target."""
    from specbranch.models.files import store

    known = [_model_row(name, model.size, model.licence, store.installed(name)) for name, model in store.KNOWN.items()]
    pairs = [_pair_row(pair) for pair in PAIRS.values()]
    if as_json:
        click.echo(json.dumps([*known, *pairs]))
        return
    click.echo("Models (--target NAME)")
    for row in known:
        click.echo(f"  {row['name']:16} {row['megabytes']:4} MB  {row['licence']:12} {row['path'] or 'not fetched'}")
    click.echo("Pairs (--pair NAME): a target, and a draft made for it")
    for row in pairs:
        click.echo(f"  {row['name']:16} {row['target']} and {_draft(row)}")


@models.command()
@click.argument("name", default=DEFAULT_PAIR)
def pull(name: str) -> None:
    """Fetch NAME, a model or the target of a pair [smollm2-default]. Afterwards it works offline.

    An interrupted fetch resumes where it stopped.
    """
    from specbranch.cli.progress import pulled
    from specbranch.models.files import store

    model = PAIRS[name].target if name in PAIRS else name
    if model not in store.KNOWN:
        raise unknown("model", name, (*store.KNOWN, *PAIRS))
    click.echo(pulled(model))


@models.command("families")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list, one object for each family.")
def list_families(as_json: bool) -> None:
    """Show which model families run natively, by the names that their files use, and with what limits.

    Any other model runs through transformers (--runner transformers), several times slower, if its cache can take
    rejected tokens back.
    """
    from specbranch.models.families.table import FAMILIES
    from specbranch.models.files.rollback import RECURRENT_FAMILIES

    rows = [_family_row(family) for family in FAMILIES.values()]
    if as_json:
        click.echo(json.dumps(rows))
        return
    click.echo("Native families: model_type in config.json; general.architecture in GGUF files; how steps run")
    for row in rows:
        files = f"{', '.join(row['model_types'])}; {', '.join(row['gguf']) or 'no GGUF'}"
        click.echo(f"  {row['name']:10} {files:38} {row['steps']:9} {row['about']}")
        if row["limits"]:
            click.echo(f"  {'':10} limits: {row['limits']}")
    click.echo(
        "compiled: machine code on CPUs, while the context fits into every window. plain: PyTorch's products there; "
        "the same texts, slower.\n"
        "On GPUs all of them run by Triton kernels.\n"
        "No family with a recurrent state runs, natively or through transformers, as it cannot take rejected tokens "
        f"back: {', '.join(sorted(RECURRENT_FAMILIES))}.\n"
        "Any other model: --runner transformers."
    )


def _family_row(family: Family) -> ModelRow:
    return {
        "name": family.name,
        "about": family.about,
        "model_types": list(family.model_types),
        "gguf": list(family.gguf_names),
        "steps": "compiled" if family.compiled else "plain",
        "limits": family.limits,
    }


def _model_row(name: str, size: int, licence: str, path: object) -> ModelRow:
    return {
        "kind": "model",
        "name": name,
        "megabytes": round(size / 1e6),
        "licence": licence,
        "path": path and str(path),
    }


def _pair_row(pair: Pair) -> ModelRow:
    row = {
        "kind": "pair",
        "name": pair.name,
        "about": pair.about,
        "target": pair.target,
        "default": pair.name == DEFAULT_PAIR,
    }
    try:
        draft = card(pair.name)
    except ModelError as error:
        return {**row, "path": None, "problem": str(error)}
    if draft is None:
        return {**row, "path": None, "problem": "it is in drafts/ of a checkout, or made by scripts/train_drafts.py"}
    figures = {"layers": draft.layers, "top1": draft.top1, "top3": draft.top3}
    return {**row, "megabytes": round(draft.megabytes, 1), **figures, "path": str(draft.path)}


def _draft(row: ModelRow) -> str:
    if row["path"] is None:
        return f"a draft that is not here: {row['problem']}"
    shares = ", ".join(
        f"{name} {row[key]:.2f}" for name, key in (("top-1", "top1"), ("top-3", "top3")) if row[key] is not None
    )
    agreement = f", agreement on held-out text {shares}" if shares else ""
    return f"a draft of {row['layers']} layers, {row['megabytes']:.0f} MB{agreement}, in {row['path']}"
