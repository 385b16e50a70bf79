"""Cases of the regret lab: drawn from a seed alone, within their ranges, and true to their chances."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from small_cases import calm

from specbranch.core.lookup import Ngrams
from specbranch.core.runner import Ask, Feed
from specbranch.core.slots import ROOT
from specbranch.lab.regret.case import (
    AGREEMENT_RANGE,
    BATCH_SIZES,
    DRAFT_SHARE,
    REQUEST_TOKENS,
    Phase,
    make_case,
    seeds_of,
)
from specbranch.lab.regret.runs import _session
from specbranch.lab.regret.toy_pair import ScriptedDraft, make_scripts

MANY = [make_case(seed) for seed in range(200)]


def test_a_seed_gives_the_same_case_in_every_process() -> None:
    code = "from specbranch.lab.regret.case import make_case; print(make_case(7))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(make_case(7)) == str(make_case(7)) != str(make_case(8))


def test_cases_stay_in_their_ranges_and_reach_both_ends() -> None:
    shares = [case.draft_share for case in MANY]
    assert DRAFT_SHARE[0] <= min(shares) < 1 / 40 and 1 / 3 < max(shares) <= DRAFT_SHARE[1]
    assert min(case.row_share for case in MANY) == 0.0 and 0.3 < max(case.row_share for case in MANY) <= 0.5
    assert {case.at_once for case in MANY} == set(BATCH_SIZES)
    agreements = [phase.agreement for case in MANY for request in case.phases for phase in request]
    assert AGREEMENT_RANGE[0] <= min(agreements) < 0.35 and 0.9 < max(agreements) <= AGREEMENT_RANGE[1]
    assert max(case.spike for case in MANY) > 2.0 and any(case.spike == 0.0 for case in MANY)
    assert max(case.lookup for case in MANY) == 1.0 and min(case.lookup for case in MANY) < 0.05


def test_every_request_has_its_tokens_and_two_batches_at_least() -> None:
    for case in MANY:
        assert {sum(phase.tokens for phase in request) for request in case.phases} == {REQUEST_TOKENS}
        assert len(case.batches) >= 2 and len(case.batches) % 2 == 0
        assert [number for batch in case.batches for number in batch] == list(range(len(case.phases)))


def test_agreement_changes_between_requests_in_some_cases_and_within_them_in_others() -> None:
    within = [any(len({one.agreement for one in request}) > 1 for request in case.phases) for case in MANY]
    between = [len({request[0].agreement for request in case.phases}) > 1 for case in MANY]
    assert 0.3 < sum(within) / len(MANY) < 0.7
    assert any(b and not w for b, w in zip(between, within, strict=True))
    assert any(not b for b in between)


def test_the_halves_share_no_seed_and_make_up_all() -> None:
    tune, report = seeds_of(0, 5, "tune"), seeds_of(0, 5, "report")
    assert sorted((*tune, *report)) == seeds_of(0, 10, None)
    assert seeds_of(3, 2, "tune") == [4, 6] and seeds_of(3, 2, "report") == [3, 5]


@pytest.mark.parametrize(("first", "then"), [(0.3, 0.9), (0.95, 0.5)])
def test_the_draft_agrees_with_the_chance_of_each_phase(first: float, then: float) -> None:
    half = REQUEST_TOKENS // 2
    case = replace(calm(), phases=((Phase(half, first, 0.1), Phase(half, then, 0.1)),) * 24)
    scripts = make_scripts(case)
    hits = [[0, 0] for _ in range(2)]
    for number, script in enumerate(scripts.requests):
        draft = ScriptedDraft(scripts)
        draft.open(number, _session(number, script).request)
        draft.extend(number, script.prompt[:-1])
        before = script.prompt[-1]
        for at, token in enumerate(script.answer[:REQUEST_TOKENS]):
            (said,) = draft.propose([Feed(number, (before,), (ROOT,))], [Ask(number, 0)])
            hits[at // half][said.tokens[0] == token] += 1
            draft.keep(number, [0], 1)
            before = token
    shares = [right / (wrong + right) for wrong, right in hits]
    assert shares == pytest.approx([first, then], abs=0.05)


@pytest.mark.parametrize("chance", [0.0, 0.5, 1.0])
def test_lookup_is_right_with_the_chance_of_the_phase(chance: float) -> None:
    right = asked = 0
    for script in make_scripts(calm(12, lookup=chance)).requests:
        tokens = list(script.prompt)
        ngrams = Ngrams(tokens, 4, 1)
        for token in script.answer[:REQUEST_TOKENS]:
            found = ngrams.propose(1)
            asked, right = asked + bool(found), right + (found == (token,))
            tokens.append(token)
    assert asked > 300 and right / asked == pytest.approx(chance, abs=0.05)
