"""Frames of a request: they add up to the answer, with the session's origins and the trace's times."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace

import pytest

from specbranch.clock.profile import CostProfile
from specbranch.core.experience import Experience
from specbranch.core.grammar import Mask
from specbranch.core.loop import Loop
from specbranch.core.methods import METHODS
from specbranch.core.orders import Context, Orders, Reports, Span, TokenLogprobs, Verdict, Verify
from specbranch.core.session import Session
from specbranch.core.trace import Trace
from specbranch.lab.bench.methods import default_setting
from specbranch.serve.frames import Film, Frame
from tiers import each_value
from toybench import Case, Ending, next_number, run_out, serial, virtual_clock

NAMES = ("autoregressive", "speculative", "pearl", "tree", "specbranch:confidence", "specbranch", "lookup")
PROFILE = CostProfile(target=((1, 8.0), (16, 8.0)), draft=((1, 1.0), (4, 1.0), (12, 1.8)))
TURNS = CostProfile(target=((1, 8.0), (16, 14.0)), draft=((1, 2.0), (4, 2.5)), overlap=False)
ENDINGS = (Ending("long", max_tokens=60), Ending("stopped", max_tokens=80, stop_token_ids=(3,)))


def filmed(
    name: str, seed: int, ending: Ending = ENDINGS[0], profile: CostProfile | None = PROFILE, looks_up: bool = True
) -> tuple[Session, list[Frame], Trace]:
    config = default_setting(name, {"num_speculative_tokens": 4, "max_branches": 6}).config
    assert config is not None
    if not looks_up and METHODS[config.method or ""].plans(config):
        config = replace(config, without=("lookup",))
    trace, film, frames = Trace(), Film(), list[Frame]()
    loop = Loop(virtual_clock(0.25, profile=profile) if profile else serial(0.25), trace)
    session = Case((seed, 2), 0.7, seed, ending).session(next_number())
    session.on_round = lambda *reported: frames.extend(filter(None, [film.see(*reported)]))
    loop.join(session, METHODS[config.method or ""].start(session, config, Experience(profile)))
    run_out(loop)
    return session, frames, trace


def said(frame: Frame) -> list[int]:
    """The tokens that a frame adds to the answer."""
    own = [] if frame.token is None else [frame.token]
    return [*(frame.nodes[node].token for node in frame.path), *own][: frame.added]


@each_value
@pytest.mark.parametrize("profile", [PROFILE, TURNS, None], ids=["beside", "in turns", "wall"])
@pytest.mark.parametrize("name", NAMES)
def test_what_frames_add_is_the_answer(name: str, profile: CostProfile | None) -> None:
    for seed, ending in itertools.product(range(2), ENDINGS):
        session, frames, _ = filmed(name, seed, ending, profile)
        assert [token for frame in frames for token in said(frame)] == session.output


@pytest.mark.parametrize("name", NAMES)
def test_a_token_that_a_draft_foresaw_has_its_node(name: str) -> None:
    """What was looked up and never sent is in no order, so that no frame can show it."""
    for seed in range(2):
        session, frames, _ = filmed(name, seed, looks_up=False)
        position = 0
        for frame in frames:
            position += frame.added
            if frame.added > len(frame.path):  # the request did not end before the target's own token
                assert (frame.hit is not None) >= (session.origins[position - 1] == "branch")
            if frame.hit is not None:
                assert frame.nodes[frame.hit].token == frame.token
                assert frame.nodes[frame.hit].parent == (frame.path[-1] if frame.path else -1)
        assert position == len(session.output)


@pytest.mark.parametrize("name", NAMES)
def test_a_path_leads_from_the_text_through_what_was_sent(name: str) -> None:
    _, frames, _ = filmed(name, 1)
    for frame in frames:
        assert all(node.parent < at and node.given <= frame.number for at, node in enumerate(frame.nodes))
        for above, node in itertools.pairwise((-1, *frame.path)):
            assert frame.nodes[node].parent == above and frame.nodes[node].sent


def test_branches_that_lose_are_seen_and_gone_after_it() -> None:
    _, frames, _ = filmed("specbranch:confidence", 1)
    lost = [
        (frame, after)
        for frame, after in itertools.pairwise(frames)
        if frame.token is not None and frame.hit is None and len(frame.nodes) > len(frame.path)
    ]
    assert lost
    for frame, after in lost:
        assert all(node.given > frame.number for node in after.nodes)


def test_times_are_those_of_the_trace() -> None:
    _, frames, trace = filmed("specbranch", 2)
    spans = [span for frame in frames for span in (frame.draft, frame.target) if span]
    assert spans == [(event.start, event.end) for event in trace.events if event.end > event.start]


def test_a_frame_is_plain_values_for_a_page() -> None:
    _, frames, _ = filmed("specbranch", 2)
    frame = next(one for one in frames if one.path)
    reported = frame.to_dict(str)
    node = frame.nodes[frame.path[0]]
    assert reported["nodes"][frame.path[0]] == [
        *(str(node.token), node.token, node.parent, round(node.said * 100) or None, node.given, 1)
    ]
    assert (reported["path"], reported["token"], reported["text"]) == (list(frame.path), frame.token, str(frame.token))


@pytest.mark.parametrize("name", ["speculative", "tree", "specbranch"])
def test_what_frames_roll_back_is_what_the_statistics_count_as_rejected(name: str) -> None:
    rolled_back = list[int]()
    for seed, ending in itertools.product(range(2), ENDINGS):
        session, frames, _ = filmed(name, seed, ending)
        rolled_back.append(sum(one.rolled_back for one in frames))
        assert rolled_back[-1] == session.stats.rejected + session.stats.siblings
        assert all(one.checked == sum(node.sent for node in one.nodes) for one in frames)
    assert sum(rolled_back) > 0


def test_a_grammar_marks_what_it_forced_and_what_it_took_the_likelier_token_from() -> None:
    allowed = (Mask.of([7]), Mask.of([3, 9]), Mask.of([2, 4, 5]))
    top = [TokenLogprobs(-0.5, ((token, -0.1),)) for token in (7, 8, 4)]
    order = Verify(Context(1, ()), (7, 9), allowed=allowed)
    reports = Reports(verdict=Verdict((0, 1), 4, tuple(top)), verifying=Span(0.0, 1.0))
    frame = Film().see(Orders(verify=order), reports, 3)
    assert frame is not None and frame.guided == ("forced", "masked", "free")
    ended = Film().see(Orders(verify=order), reports, 2)
    assert ended is not None and ended.guided == ("forced", "masked") and ended.rolled_back == 0
    free = Film().see(Orders(verify=replace(order, allowed=None)), reports, 3)
    assert free is not None and free.guided == ()


def test_a_planned_round_says_its_share_of_the_batch() -> None:
    loop, films = Loop(virtual_clock(0.25, profile=PROFILE)), dict[int, list[Frame]]()
    config = default_setting("specbranch", {"num_speculative_tokens": 4, "max_branches": 6}).config
    assert config is not None
    for seed in range(3):
        session, film = Case((seed, 2), 0.7, seed, ENDINGS[0]).session(next_number()), Film()
        frames = films[session.number] = []
        session.on_round = lambda *seen, film=film, frames=frames: frames.extend(filter(None, [film.see(*seen)]))
        loop.join(session, METHODS["specbranch"].start(session, config, Experience(PROFILE)))
    run_out(loop)
    shares = [one.batch for frames in films.values() for one in frames if one.batch]
    assert max(one.requests for one in shares) == 3
    assert all(one.own_rows <= one.rows and (one.requests > 1 or one.own_rows == one.rows) for one in shares)
    by_round = defaultdict(list)
    for frames in films.values():
        for one in frames:
            if one.batch and one.batch.requests == 3:
                by_round[one.target].append(one.batch)
    whole = [shares for shares in by_round.values() if len(shares) == 3]
    assert whole and all(sum(one.own_rows for one in shares) == shares[0].rows for shares in whole)


@pytest.mark.parametrize("name", ["pearl", "tree", "specbranch"])
def test_a_trimmed_frame_says_the_same(name: str) -> None:
    _, frames, _ = filmed(name, 1)
    assert any(len(frame.nodes) > 12 for frame in frames) or name == "pearl"
    for frame in frames:
        trimmed = frame.trimmed(12)
        assert said(trimmed) == said(frame) and (trimmed.hit is None) == (frame.hit is None)
        assert len(trimmed.nodes) <= max(12, len(frame.path) + 1)
        assert trimmed.drafted == frame.drafted == sum(node.given == frame.number for node in frame.nodes)
        assert all(node.parent < at for at, node in enumerate(trimmed.nodes))
        assert (trimmed.checked, trimmed.rolled_back) == (frame.checked, frame.rolled_back)
        if frame.checked < 6:
            assert sum(node.sent for node in trimmed.nodes) == frame.checked
        for above, node in itertools.pairwise((-1, *trimmed.path)):
            assert trimmed.nodes[node].parent == above
