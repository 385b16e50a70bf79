"""Checks of a pair: before loading, that both models are present and fit together; afterwards, how well it does.

Owns these checks and their wording. Invariants: a check reports what it finds and never raises. Nothing is fetched.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbranch.assembly import ModelChoice, common_vocabulary, fitted_to_target, load_tokenizer, translation
from specbranch.errors import SpecBranchError
from specbranch.lab.doctor.finding import Finding, note, problem, well
from specbranch.lab.measure.loaded_pair import own_runner, precision
from specbranch.pairs import PAIRS, draft_folder

if TYPE_CHECKING:
    from specbranch.clock.profile import CostProfile
    from specbranch.training.distill.agreement import Agreement


def models_at_hand(target: ModelChoice, draft: ModelChoice) -> Iterator[Finding]:
    """Check that both models are present and complete, and what their vocabularies have in common."""
    found = [target_at_hand(target.name), _draft(draft.name)]
    yield from found
    if all(finding.level != "problem" for finding in found):
        yield _vocabulary(target, draft)


def target_at_hand(name: str) -> Finding:
    """Check that a target is present and complete."""
    from specbranch.models.files import store
    from specbranch.models.files.locate import locate

    if name in store.KNOWN and not Path(name).exists():
        if store.installed(name) is None:
            return problem("Target", f"{name} is not here, or damaged.", f"Fetch it: specbranch models pull {name}")
        return well("Target", f"{name} is here and whole: its sha256 is the pinned one.")
    if not Path(name).expanduser().exists():
        return note("Target", f"{name} is not a file here; it is looked for on the Hub.")
    try:
        locate(name)
    except SpecBranchError as error:
        return problem("Target", str(error))
    return well("Target", f"{name} is here.")


def _draft(name: str) -> Finding:
    """Check that a draft is present, complete, and made for this target."""
    from specbranch.models.drafts.draft_name import draft_config
    from specbranch.models.files.locate import locate

    try:
        folder = Path(draft_folder(name)) if name in PAIRS else Path(locate(name).path)
    except SpecBranchError as error:
        return problem("Draft", str(error))
    if draft_config(folder) is None:
        return well("Draft", f"{name} is here.")
    if not (folder / "model.safetensors").is_file():
        advice = "Train it again with `specbranch distill`, or take another draft."
        return problem("Draft", f"{folder} has no model.safetensors.", advice)
    return well("Draft", f"{name} is here, with all of its files.")


def _vocabulary(target: ModelChoice, draft: ModelChoice) -> Finding:
    try:
        tokenizer, fitted = load_tokenizer(target), fitted_to_target(draft, target.name)
        shared = common_vocabulary(tokenizer, fitted)
        if fitted.speaks_for:
            return note("Vocabulary", translation(fitted).sentence())
    except SpecBranchError as error:
        return problem("Vocabulary", str(error))
    if shared == tokenizer.vocabulary_size:
        return well("Vocabulary", f"draft and target share all {shared} tokens.")
    said = f"draft and target share the first {shared} of {tokenizer.vocabulary_size} tokens"
    return note("Vocabulary", f"{said}; the others are never drafted.")


def kernels(name: str, runner: Any) -> Finding:
    """Report how a model runs, and whether its compiled step is used."""
    about, runner = f"Kernels of the {name}", own_runner(runner)
    if not hasattr(runner, "decoder"):
        advice = "The native decoder does not know its architecture, or --runner asked for this."
        return note(about, "it runs on transformers, which is slower.", advice)
    dtype = precision(runner)
    kind = f"as they are stored{_multiplied(runner)}" if runner.weights == "stored" else f"in {runner.weights}"
    stored = "" if runner.weights == dtype else f", with weights {kind}"
    stored += "" if runner.cache_dtype == dtype else f", keys and values in {runner.cache_dtype}"
    if runner.device.type != "cpu":
        return well(about, f"it runs on {runner.device}, in {dtype}{stored}.")
    if getattr(runner, "_fused", None) is not None:
        return well(about, f"the compiled step agrees with the plain one on this machine and is used{stored}.")
    if dtype != "float32":
        return note(about, f"there is no compiled step for {dtype}.", "Leave --dtype out for float32.")
    if runner.weights.startswith("int4") or runner.weights == "fp8-block":
        advice = "Choose int8 with --weights, of a draft with --draft-weights."
        return note(about, f"there is no compiled step for {runner.weights}.", advice)
    advice = "Install llvmlite if it is missing; if it is there, this processor or these shapes have no kernel."
    return note(about, "the compiled step is not used here, so that small forwards are slower.", advice)


def _multiplied(runner: Any) -> str:
    from specbranch.models.cpu.block_kernels import integer_products

    by = integer_products() if runner.device.type == "cpu" else ""
    return f" (multiplied by {by})" if by else ""


def agreement(found: Agreement) -> Finding:
    """Report how well a draft agrees with its target."""
    said = (
        f"the draft's first choice is the target's token in {found.top1:.0%} of {found.tokens} places, "
        f"among its first three in {found.top3:.0%}."
    )
    if found.top1 < 0.3:
        advice = "This draft is hardly better than none: take another one, or train one with `specbranch distill`."
        return problem("Agreement", said, advice)
    if found.top1 < 0.5:
        return note("Agreement", said, "That is little: only short drafts pay.")
    return well("Agreement", said)


def costs(profile: CostProfile) -> Finding:
    """Report the cost of the draft."""
    target, draft = profile.target_seconds(1), profile.draft_seconds(1)
    ratio, more = target / draft, profile.target_seconds(4) / target
    said = (
        f"c = {ratio:.1f}: a target forward takes {target * 1e3:.1f} ms, a draft step {draft * 1e3:.1f} ms; "
        f"verifying 4 tokens costs {more:.2f} times as much as one."
    )
    if ratio < 2:
        return note("Costs", said, "The draft is dear: take a smaller one, or method lookup, which needs none.")
    return well("Costs", said)
