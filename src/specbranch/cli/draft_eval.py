"""`specbranch draft-eval`: how well a draft agrees with a target, and what it costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specbranch.cli.options import DRAFT, PAIR, TABLES, TARGET, with_options
from specbranch.cli.sections import PATH, SectionedCommand
from specbranch.errors import BadParameter
from specbranch.pairs import chosen_models

if TYPE_CHECKING:
    from specbranch.assembly import ModelChoice
    from specbranch.engine import LLM
    from specbranch.training.distill.agreement import Agreement, AnsweredPrompt


@click.command("draft-eval", cls=SectionedCommand, tables={"Pairs": TABLES["Pairs"]})
@with_options(PAIR, TARGET, DRAFT)
@click.option(
    "--prompts", type=PATH, required=True, metavar="FILE", help="File of prompts, in the format of generate --file."
)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Use only the first N prompts.")
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    default=128,
    metavar="N",
    help="Maximum number of tokens in an answer of the target [128].",
)
@click.option(
    "--save",
    is_flag=True,
    help="Write the counts to evaluation.json in the draft's folder; a planner starts from them.",
)
@click.option("--raw", is_flag=True, help="Pass the prompts to the target without its chat template.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object: top1, top3, expected_length, c, evaluation …"
)
def draft_eval(
    prompts: Path, limit: int | None, max_tokens: int, raw: bool, save: bool, as_json: bool, **given: Any
) -> None:
    """Measure how well a draft agrees with a target's own greedy answers, and what a draft step costs here.

    top1 is the share of tokens that are the draft's first choice; top3 counts its first three choices. The expected
    acceptance length says how many tokens of a draft of 1 to 10 tokens would be accepted. c is the cost of a target
    forward over one token in draft steps; both include the choice of the next token.

    The counts are the draft's candidates by class of its probability, and how many of them are the target's token.
    With --save a draft made by `specbranch distill` carries them: every later planner starts from them.
    """
    from specbranch.assembly import common_vocabulary, make_drafter
    from specbranch.cli.generate import read_prompts
    from specbranch.cli.options import asking_once, load_llm
    from specbranch.models.drafts.evaluation_file import check_folder, write_evaluation
    from specbranch.training.distill.agreement import compare, step_seconds

    asked, choice = read_prompts(None, prompts)[:limit], _draft_choice(given)
    folder = check_folder(choice.name) if save else None
    with load_llm(asking_once({**given, "draft": None, "method": "autoregressive"})) as target:
        drafter = make_drafter(choice, common_vocabulary(target.tokenizer, choice), target.target_runner)
        texts = _answers(target, asked, max_tokens, raw)
        found = compare(drafter.runner, texts, f"greedy answers to {len(texts)} prompts of {prompts.name}")
        before = texts[0].prompt[: drafter.runner.context_length - 1]
        ratio = step_seconds(target.target_runner, before) / step_seconds(drafter.runner, before)
    saved = write_evaluation(folder, found.evaluation) if folder else None
    click.echo(json.dumps(_record(found, ratio, len(texts))) if as_json else _table(found, ratio, len(texts)))
    if saved is not None:
        click.echo(f"The counts are in {saved}.", err=as_json)


def _draft_choice(given: dict[str, Any]) -> ModelChoice:
    """Return the draft to look at: that of a pair, or the one named."""
    from specbranch.assembly import ModelChoice, fitted_to_target

    target, draft = chosen_models(given["pair"], given["target"], given["draft"])
    if draft is None:
        raise BadParameter("draft-eval needs a draft to look at. Give one with --draft, or name a --pair.")
    names: dict[str, Any] = {
        name: given[name] for name in ("runner", "dtype", "context_length") if given[name] is not None
    }
    device = given["draft_device"] or given["device"]
    return fitted_to_target(
        ModelChoice(draft, device=device, shorten=True, weights=given["draft_weights"], **names), target
    )


def _answers(target: LLM, prompts: list[str], max_tokens: int, raw: bool) -> list[AnsweredPrompt]:
    from specbranch import SamplingParams
    from specbranch.cli.progress import tracked
    from specbranch.training.distill.agreement import AnsweredPrompt

    texts = []
    for prompt in tracked(prompts, "The target answers"):
        ids = target.tokenizer.encode(prompt) if raw else target.tokenizer.chat([{"role": "user", "content": prompt}])
        answer = target.generate([ids], SamplingParams(max_tokens=max_tokens))[0]
        if answer.error is not None:
            click.echo(f"Left out: {prompt[:40]!r}… ({answer.error})", err=True)
            continue
        texts.append(AnsweredPrompt(tuple(ids), answer.token_ids))
    if not texts:
        raise BadParameter(
            "The target could answer none of the prompts, so there is nothing to compare. Give shorter ones."
        )
    return texts


def _record(found: Agreement, ratio: float, prompts: int) -> dict[str, Any]:
    from specbranch.models.drafts.evaluation_file import evaluation_to_dict

    return {
        "prompts": prompts,
        "tokens": found.tokens,
        "top1": found.top1,
        "top3": found.top3,
        "expected_length": list(found.expected_length),
        "c": ratio,
        "evaluation": evaluation_to_dict(found.evaluation),
    }


def _table(found: Agreement, ratio: float, prompts: int) -> str:
    lengths = "\n".join(
        f"  draft of {n:2}: {length:5.2f} accepted" for n, length in enumerate(found.expected_length, 1)
    )
    return (
        f"{prompts} prompts, {found.tokens} tokens of the target's own text\n"
        f"top-1 agreement {found.top1:.3f}, top-3 {found.top3:.3f}, covered by the planner's candidates "
        f"{found.evaluation.covered / max(found.tokens, 1):.3f}\n{lengths}\n"
        f"c = {ratio:.2f}: a target forward over one token costs as much as {ratio:.2f} draft steps here"
    )
