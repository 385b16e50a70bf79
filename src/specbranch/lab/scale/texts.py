"""Texts for fleets: toy requests on which a draft is right with a given chance, and prompt lookup is not.

Owns the choice of these texts; they are made by the regret lab's generator. Invariant: equal arguments give equal
texts in every process.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from specbranch.lab.regret.case import REQUEST_TOKENS, Phase, make_case
from specbranch.lab.regret.toy_pair import Scripts, make_scripts

FLEET_TEXTS = 24  # different requests; a longer run repeats them
TEXT_SEED = 1
SURE_SPREAD = 0.5  # how much the draft's confidence says about a position
SECOND_CHANCE = 0.5  # the chance that the next candidate is right if those before it are wrong


@lru_cache(maxsize=8)
def make_texts(agreement: float, count: int = FLEET_TEXTS) -> Scripts:
    """Return requests whose draft is right at each position with the chance `agreement`."""
    phases = ((Phase(REQUEST_TOKENS, agreement, 0.0),),) * count
    case = make_case(TEXT_SEED)
    return make_scripts(replace(case, spread=SURE_SPREAD, bias=1.0, second=SECOND_CHANCE, phases=phases))
