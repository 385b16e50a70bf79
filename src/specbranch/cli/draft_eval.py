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

ALL_KINDS, SHOWN_CHAIN = "all", 5  # the chain whose tokens a forward are shown

if TYPE_CHECKING:
    from specbranch.assembly import ModelChoice
    from specbranch.core.runner import Runner
    from specbranch.engine import LLM
    from specbranch.training.distill.agreement import Agreement, AnsweredPrompt

    Kinds = dict[str, Agreement]  # by kind of text; ALL_KINDS: of all texts


@click.command("draft-eval", cls=SectionedCommand, tables={"Pairs": TABLES["Pairs"]})
@with_options(PAIR, TARGET, DRAFT)
@click.option(
    "--prompts",
    type=PATH,
    required=True,
    multiple=True,
    metavar="FILE",
    help='File of prompts, in the format of generate --file; repeat for more. A "category" names a kind of text, else '
    "the file does.",
)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Use only the first N prompts of each file.")
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
    "--json", "as_json", is_flag=True, help="Print one JSON object: top1, top3, expected_length, c, kinds, evaluation …"
)
def draft_eval(
    prompts: tuple[Path, ...], limit: int | None, max_tokens: int, raw: bool, save: bool, as_json: bool, **given: Any
) -> None:
    """Measure how well a draft agrees with a target's own greedy answers, and what a draft step costs here.

    top1 is the share of tokens that are the draft's first choice; top3 counts its first three choices. The expected
    acceptance length says how many tokens of a draft of 1 to 10 tokens would be accepted; a forward of the target gives
    one more. c is the cost of a target forward over one token in draft steps; both include the choice of the next
    token. The expected speed follows from both, by kind of text. It leaves out the planner, lookup and trees, and
    takes a verify of a chain to cost as much as a forward over one token.

    The counts are the draft's candidates by class of its probability, and how many of them are the target's token.
    With --save a draft made by `specbranch distill` carries them: every later planner starts from them.
    """
    from specbranch.assembly import common_vocabulary, make_drafter
    from specbranch.cli.options import asking_once, load_llm
    from specbranch.models.drafts.evaluation_file import check_folder, write_evaluation
    from specbranch.training.distill.agreement import step_seconds

    asked, choice = _prompts(prompts, limit), _draft_choice(given)
    folder = check_folder(choice.name) if save else None
    with load_llm(asking_once({**given, "draft": None, "method": "autoregressive"})) as target:
        drafter = make_drafter(choice, common_vocabulary(target.tokenizer, choice), target.target_runner)
        texts = _answers(target, asked, max_tokens, raw)
        names = ", ".join(file.name for file in prompts)
        found = _judged_kinds(drafter.runner, target, texts, f"greedy answers to {len(texts)} prompts of {names}")
        before = texts[0][1].prompt[: drafter.runner.context_length - 1]
        ratio = step_seconds(target.target_runner, before) / step_seconds(drafter.runner, before)
    saved = write_evaluation(folder, found[ALL_KINDS].evaluation) if folder else None
    click.echo(json.dumps(_record(found, ratio, len(texts))) if as_json else _table(found, ratio, len(texts)))
    if saved is not None:
        click.echo(f"The counts are in {saved}.", err=as_json)


def _prompts(files: tuple[Path, ...], limit: int | None) -> list[tuple[str, str]]:
    """Return the kind and the text of each prompt."""
    from specbranch.cli.generate import read_prompts
    from specbranch.text.line_files import categories_in

    found = []
    for file in files:
        texts = read_prompts(None, file)[:limit]
        found += list(zip(categories_in(file)[: len(texts)], texts, strict=True))
    return found


def _judged_kinds(runner: Runner, target: LLM, texts: list[tuple[str, AnsweredPrompt]], about: str) -> Kinds:
    """Return the agreement on all texts, and on those of each kind."""
    from specbranch.training.distill.agreement import agreement_of, judged_text

    reads_features = hasattr(runner, "refresh")  # such a runner drops rows that it made without the target's features
    beside = target.target_runner if reads_features else None
    judged = [(kind, judged_text(runner, text, beside)) for kind, text in texts]
    found = {ALL_KINDS: agreement_of([text for _, text in judged], about)}
    for name in dict.fromkeys(kind for kind, _ in judged):
        found[name] = agreement_of([text for kind, text in judged if kind == name])
    return found


def _draft_choice(given: dict[str, Any]) -> ModelChoice:
    """Return the draft to look at: that of a pair, or the one named."""
    from specbranch.assembly import ModelChoice, fitted_to_target

    target, draft = chosen_models(given["pair"], given["target"], given["draft"])
    if draft is None:
        raise BadParameter("draft-eval needs a draft to look at. Give one with --draft, or name a --pair.")
    names: dict[str, Any] = {
        name: given[name] for name in ("runner", "dtype", "context_length") if given[name] is not None
    }
    names |= {"weights": given["draft_weights"], "draft_window": given["draft_window"]}
    device = given["draft_device"] or given["device"]
    return fitted_to_target(ModelChoice(draft, device=device, shorten=True, **names), target)


def _answers(
    target: LLM, prompts: list[tuple[str, str]], max_tokens: int, raw: bool
) -> list[tuple[str, AnsweredPrompt]]:
    from specbranch import SamplingParams
    from specbranch.cli.progress import tracked
    from specbranch.training.distill.agreement import AnsweredPrompt

    texts = []
    for kind, prompt in tracked(prompts, "The target answers"):
        ids = target.tokenizer.encode(prompt) if raw else target.tokenizer.chat([{"role": "user", "content": prompt}])
        answer = target.generate([ids], SamplingParams(max_tokens=max_tokens))[0]
        if answer.error is not None:
            click.echo(f"Left out: {prompt[:40]!r}… ({answer.error})", err=True)
            continue
        texts.append((kind, AnsweredPrompt(tuple(ids), answer.token_ids)))
    if not texts:
        raise BadParameter(
            "The target could answer none of the prompts, so there is nothing to compare. Give shorter ones."
        )
    return texts


def _record(kinds: Kinds, ratio: float, prompts: int) -> dict[str, Any]:
    from specbranch.models.drafts.evaluation_file import evaluation_to_dict

    found = kinds[ALL_KINDS]
    return {
        "prompts": prompts,
        "tokens": found.tokens,
        "top1": found.top1,
        "top3": found.top3,
        "expected_length": list(found.expected_length),
        "c": ratio,
        "step": 1 / ratio,
        "kinds": {name: _figures(one, ratio) for name, one in kinds.items()},
        "evaluation": evaluation_to_dict(found.evaluation),
    }


def _figures(found: Agreement, ratio: float) -> dict[str, Any]:
    length, speed = _best(found, ratio)
    return {
        "tokens": found.tokens,
        "top1": found.top1,
        "top1_by_depth": list(found.by_depth),
        "tokens_a_forward": list(found.tokens_a_forward),
        "best_length": length,
        "expected_speed": speed,
    }


def _best(found: Agreement, ratio: float) -> tuple[int, float]:
    """Return the length of a chain that is expected to be fastest, and its speed relative to plain decoding."""
    speeds = {length: found.speed(length, 1 / ratio) for length in range(1, len(found.expected_length) + 1)}
    length = max(speeds, key=speeds.__getitem__)
    return length, speeds[length]


def _table(kinds: Kinds, ratio: float, prompts: int) -> str:
    found = kinds[ALL_KINDS]
    lengths = "\n".join(
        f"  draft of {n:2}: {length:5.2f} accepted" for n, length in enumerate(found.expected_length, 1)
    )
    return (
        f"{prompts} prompts, {found.tokens} tokens of the target's own text\n"
        f"top-1 agreement {found.top1:.3f}, top-3 {found.top3:.3f}, covered by the planner's candidates "
        f"{found.evaluation.covered / max(found.tokens, 1):.3f}\n{lengths}\n"
        f"c = {ratio:.2f}: a target forward over one token costs as much as {ratio:.2f} draft steps here; a draft step "
        f"takes {1 / ratio:.1%} of it\n{_by_kind(kinds, ratio)}"
    )


def _by_kind(kinds: Kinds, ratio: float) -> str:
    wide = max(len("kind"), *map(len, kinds))
    lines = [
        f"{'kind':{wide}}  tokens  top-1 after 0, 1, 2 … right ones        chain of {SHOWN_CHAIN}   expected speed"
    ]
    for name, found in kinds.items():
        length, speed = _best(found, ratio)
        depths = " ".join(f"{one:.2f}".removeprefix("0") for one in found.by_depth[:8])
        brings = found.tokens_a_forward[SHOWN_CHAIN - 1]
        lines.append(
            f"{name:{wide}}  {found.tokens:6}  {depths:40} {brings:5.2f} tokens  {speed:5.2f} × (chains of {length})"
        )
    return "\n".join(lines)
