"""`specbranch distill --from-served`: a draft learns on from what a server kept.

Owns what of the command's options that takes, and its table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from specbranch.errors import BadParameter

# Options that say what a new draft is; one that learns on stays what it was.
OF_NEW_DRAFTS = ("kind", "layers", "start", "taps", "unroll", "head", "head_tokens", "storage", "only_write")


def learn(served: Path, draft: str | None, as_json: bool, given: Mapping[str, Any]) -> None:
    """Let a draft learn on, and print its figures."""
    from specbranch.cli.progress import counted, pulled
    from specbranch.training.making.served_draft import ServedJob, learn_from_served

    if not draft:
        raise BadParameter("--from-served needs the draft that learns on: --resume DRAFT, a folder or a pair's name.")
    _refuse_options_of_new_drafts()
    taken = {name: value for name, value in given.items() if name not in OF_NEW_DRAFTS and value is not None}
    job = ServedJob(draft=draft, served=served, **{**taken, "target": given["target"] or ""})
    with counted() as bars:
        record = learn_from_served(job, pulled, bars)
    click.echo(json.dumps(record) if as_json else table(record))


def _refuse_options_of_new_drafts() -> None:
    context = click.get_current_context()
    for name in OF_NEW_DRAFTS:
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise BadParameter(
                f"--{name.replace('_', '-')} is for new drafts; with --from-served a draft stays what it is. Leave it "
                "out."
            )


def table(record: Mapping[str, Any]) -> str:
    """Return the agreement by kind, before and after."""
    head = f"{'held-out text':14} {'tokens':>7}   {'top-1':>14}   {'top-3':>14}   tokens a forward"
    rows = [head]
    for found in record["agreement"]:
        one, other = found["before"], found["after"]
        shares = "   ".join(f"{one[name]:.3f} → {other[name]:.3f}".rjust(14) for name in ("top1", "top3"))
        forward = f"{one['tokens_per_forward']:.2f} → {other['tokens_per_forward']:.2f}"
        rows.append(f"{found['kind']:14} {found['tokens']:>7,}   {shares}   {forward}")
    texts = f"{record['served_texts']:,} served texts, {record['served_held_out']:,} of them held out"
    return "\n".join(
        [
            f"The draft that learned on is in {record['out']}; {record['draft']} is as it was.",
            *rows,
            f"Tokens a forward: greedy, with a chain of {record['chain']}. {texts}; {record['tokens']:,} tokens "
            f"trained on in {record['steps']:,} steps ({record['seconds']:.0f} s).",
        ]
    )
