"""A trace read round by round tells the same as the statistics, and its drawings hold it at any width."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass

import pytest

from specbranch.clock.profile import CostProfile
from specbranch.core.arms import Arm
from specbranch.core.experience import Experience
from specbranch.core.fates import Fates, summed
from specbranch.core.session import Session
from specbranch.core.trace import Event, Trace
from specbranch.lab.bench.methods import default_setting
from specbranch.lab.traces.rounds import TracedRound, read_rounds, times, usual_seconds
from specbranch.lab.traces.spans import SPAN_LOOKS
from specbranch.lab.traces.timeline import Style, draw_text
from specbranch.lab.traces.timeline_svg import PICTURE_WIDTH, draw_comparison, draw_svg
from tiers import each_value, tiered
from toybench import Case, Ending, decode, serial, virtual_clock

METHODS = (
    *("autoregressive", "speculative", "adaptive", "pearl", "tree", "specbranch:confidence", "specbranch", "auto"),
    *("lookup", "lookahead"),
)
PROFILE = CostProfile(target=((1, 8.0), (16, 8.0)), draft=((1, 1.0), (4, 1.0), (12, 1.8)))
# a draft so slow that often only the text is looked up
TURNS = CostProfile(target=((1, 8.0), (16, 14.0)), draft=((1, 5.0), (4, 5.5)), overlap=False)
ENDINGS = (Ending("long", max_tokens=60), Ending("stopped", max_tokens=80, stop_token_ids=(3,)))


@dataclass(frozen=True)
class Run:
    session: Session
    rounds: list[TracedRound]


def run(method: str, seed: int = 1, ending: Ending = ENDINGS[0], profile: CostProfile | None = PROFILE) -> Run:
    trace = Trace()
    config = default_setting(method, {"num_speculative_tokens": 4, "max_branches": 12}).config
    assert config is not None
    executor = virtual_clock(0.25, profile=profile) if profile else serial(0.25)
    session = decode(executor, Case((seed, 2), 0.7, seed, ending), config, trace=trace, experience=Experience(profile))
    return Run(session, read_rounds(trace.events, session.stats.emitted, session.origins))


def rects(picture: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}rect"))


@each_value
@pytest.mark.parametrize("ending", ENDINGS, ids=lambda ending: ending.name)
@pytest.mark.parametrize(
    "method",
    tiered((m for m in METHODS if m not in ("autoregressive", "lookup")), ("pearl", "specbranch").__contains__),
)
def test_what_became_of_drafted_tokens_is_what_the_statistics_count(method: str, ending: Ending) -> None:
    for seed, profile in itertools.product(range(12), (PROFILE, TURNS)):
        made = run(method, seed, ending, profile)
        stats, fate = made.session.stats, summed(one.fate for one in made.rounds)
        for name in ("accepted", "rejected", "siblings", "losing"):
            assert getattr(fate, name) == getattr(stats, name), name
        assert fate.dropped + fate.unused == stats.dropped + stats.unused
        assert fate.total == stats.drafted


@pytest.mark.parametrize("method", METHODS)
def test_the_rounds_emit_the_answer(method: str) -> None:
    for ending in ENDINGS:
        made = run(method, ending=ending)
        assert sum(one.emitted for one in made.rounds) == made.session.stats.emitted
        assert all(one.target is None or one.emitted > 0 for one in made.rounds)


@pytest.mark.parametrize("method", METHODS)
def test_the_kinds_of_time_add_up_and_idleness_is_that_of_the_statistics(method: str) -> None:
    made = run(method)
    spent, stats = times(made.rounds), made.session.stats.summary()
    assert spent.decoding == pytest.approx(stats["decode_seconds"])  # this profile has no host time
    assert spent.target_idle == pytest.approx(stats["target_idle_seconds"])
    assert spent.neither == pytest.approx(0.0)
    if spent.has_draft:
        assert spent.draft_idle == pytest.approx(stats["draft_idle_seconds"])
    assert (spent.together > 0) == (method in ("pearl", "specbranch:confidence", "specbranch", "auto"))


def test_models_that_take_turns_are_never_together() -> None:
    turns = CostProfile(target=PROFILE.target, draft=PROFILE.draft, overlap=False)
    for profile in (turns, None):
        spent = times(run("pearl", profile=profile).rounds)
        assert spent.together == 0 and spent.draft_alone > 0 and spent.target_alone > 0


@each_value
@pytest.mark.parametrize("unicode", [True, False])
@pytest.mark.parametrize("width", [40, 57, 80, 200])
@pytest.mark.parametrize("method", METHODS)
def test_no_line_is_wider_than_the_terminal(method: str, width: int, unicode: bool) -> None:
    made = run(method)
    style = Style(width, unicode, spell=lambda ids: " ".join(f"wörd{i}" for i in ids))
    text = draw_text(made.rounds, made.session.stats.summary(), style)
    assert max(map(len, text.splitlines())) <= width
    assert text.isascii() or unicode
    assert all(f"\n{one.number:>3} " in text for one in made.rounds)


def test_a_terminal_narrower_than_forty_is_drawn_for_as_if_it_had_forty() -> None:
    made = run("specbranch")
    narrow, forty = (draw_text(made.rounds, made.session.stats.summary(), Style(width)) for width in (7, 40))
    assert narrow == forty


def test_kept_lost_and_rolled_back_differ_without_colours() -> None:
    rounds = [
        TracedRound(0, None, Event(0, 0, "target", 0.0, 1.0, 3, 0, accepted=0, tokens=(9,)), (), 1),
        TracedRound(1, Event(0, 1, "draft", 1.0, 1.5, 4, 0, branches=(3,)), None, (Fates(accepted=2, rejected=1),)),
        TracedRound(
            2,
            Event(0, 2, "draft", 2.0, 3.0, 8, 3, branches=(4, 4), kept=1),
            Event(0, 2, "target", 2.0, 4.0, 4, 3, accepted=2, tokens=(1, 2, 5), refused=(7,)),
            (Fates(losing=4), Fates(accepted=1, dropped=2, unused=1)),
            3,
        ),
    ]
    text = draw_text(rounds, run("specbranch").session.stats.summary(), Style(170, spell=str))
    chain, target, branches = (line for line in text.splitlines() if line[11:12] in set("▓█"))
    assert "▓x" in chain and "chain of 3: 2 in the answer, 1 rolled back" in chain
    assert "2 of 3 accepted, +3: '(1, 2, 5)'" in target
    assert "2 branches of 4: number 2 kept, 1 in the answer, 2 dropped, 1 never judged" in branches
    bar = branches[11:].split("  ")[0]
    assert bar.count("·") == len(bar) / 2  # half of the time it waits
    legend = text.split("\n\n")[0]
    assert all(f"{glyph} drafted" in legend for glyph in "▓x~?-") and "· waiting" in legend


def test_the_totals_tell_what_was_expected_of_each_arm() -> None:
    made = run("specbranch")
    told = {"small tree": Arm(12, 40, 1.0, 50.0, 1.0).to_dict(), "plain": Arm(2, 2, 0.1, 2.0, 0.1).to_dict()}
    text = draw_text(made.rounds, {**made.session.stats.summary(), "arms": told}, Style(170))
    assert "Tokens a second by arm: small tree: 50 expected, 40 seen; plain: 20 expected, 20 seen." in text
    assert "by arm" not in draw_text(made.rounds, {**made.session.stats.summary(), "arms": {}}, Style(170))


def test_colours_change_nothing_but_colours() -> None:
    made = run("specbranch")
    styles = Style(80), Style(80, paint=lambda words, kind: f"\x1b[1m{words}\x1b[0m")
    plain, painted = (draw_text(made.rounds, made.session.stats.summary(), style) for style in styles)
    assert painted != plain and painted.replace("\x1b[1m", "").replace("\x1b[0m", "") == plain


def test_one_round_far_longer_than_the_others_does_not_flatten_them() -> None:
    events = [
        Event(0, n, "target", 10.0 * n, 10.0 * n + (1000.0 if n == 7 else 1.0), 1, 0, accepted=0, tokens=(1,))
        for n in range(12)
    ]
    text = draw_text(read_rounds(events), run("autoregressive").session.stats.summary(), Style(100))
    bars = [line[11:].split(" ")[0] for line in text.splitlines() if line[4:10] == "target" and "prompt" not in line]
    assert bars[6].endswith("»") and all(len(bar) >= 5 for bar in bars)


def test_the_text_of_a_modelled_clock_says_so() -> None:
    made = run("pearl")
    stats = made.session.stats.summary()
    assert "modelled, not measured" in draw_text(made.rounds, stats, Style(200), modelled=True)
    assert "(measured)" in draw_text(made.rounds, stats, Style(200))


@pytest.mark.parametrize("method", tiered(METHODS, ("pearl", "specbranch").__contains__))
def test_the_picture_is_whole_and_stays_within_its_frame_however_long_the_request(method: str) -> None:
    made = run(method, ending=Ending("very long", max_tokens=300))
    drawn = draw_svg(made.rounds, "a <title> & more", "below")
    frame = [float(number) for number in ElementTree.fromstring(drawn).attrib["viewBox"].split()]
    bars = [bar for bar in rects(drawn) if bar.get("class") != "sheet"]
    assert len(bars) >= len(made.rounds) and frame[2] == PICTURE_WIDTH
    for bar in bars:
        assert float(bar.attrib["x"]) >= 0 and float(bar.attrib["x"]) + float(bar.attrib["width"]) <= frame[2] + 0.5
        assert float(bar.attrib["y"]) + float(bar.attrib["height"]) <= frame[3]
    assert len({bar.attrib["y"] for bar in bars}) > 4  # several rows


def test_the_picture_has_a_cell_for_each_fate_in_its_colour() -> None:
    made = run("specbranch")
    shades = [bar.get("class") for bar in rects(draw_svg(made.rounds, "t")) if len(bar)]  # those with a tip
    fates = [fate for one in made.rounds for fate in one.fates]
    assert shades.count(f"f{SPAN_LOOKS['losing'].hue}") == sum(fate.losing > 0 for fate in fates) > 0
    assert shades.count(f"f{SPAN_LOOKS['accepted'].hue}") == sum(fate.accepted > 0 for fate in fates) > 0


def test_several_methods_are_drawn_at_one_scale() -> None:
    runs = {method: run(method).rounds for method in ("autoregressive", "pearl")}
    shade = f"f{SPAN_LOOKS['target'].hue}"
    bars = [bar.attrib for bar in rects(draw_comparison(runs, "two ways", "units")) if bar.get("class") == shade]
    ends: dict[str, float] = {}
    for bar in bars[1:]:  # the first is the legend's
        ends[bar["y"]] = max(ends.get(bar["y"], 0.0), float(bar["x"]) + float(bar["width"]))
    assert max(ends.values()) <= PICTURE_WIDTH and len(set(ends.values())) == 2
    assert len({bar["width"] for bar in bars[1:]}) == 1  # this target takes as long for any number of tokens


def test_a_request_of_one_token_can_be_drawn() -> None:
    made = run("specbranch", ending=Ending("one", max_tokens=1))
    assert "Only the first token" in draw_text(made.rounds, made.session.stats.summary(), Style(80))
    assert ElementTree.fromstring(draw_svg(made.rounds, "t")) is not None
    assert usual_seconds(made.rounds) > 0
