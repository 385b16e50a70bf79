"""Stop strings end a text at the right token, and nothing of them is ever shown."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from small_tokenizers import CountingDecoder
from specbranch.text.detokenizer import Detokenizer
from specbranch.text.stop import StopStrings
from specbranch.text.tokenizer import Tokenizer


def watch(
    tokenizer: Tokenizer, ids: Sequence[int], stops: Sequence[str], min_tokens: int = 0
) -> tuple[StopStrings, int | None, list[str]]:
    """Feed tokens up to the stop; returns the watcher, the index of the stopping token and what was shown step by
    step."""
    watcher = StopStrings(stops, Detokenizer(tokenizer), min_tokens)
    shown: list[str] = []
    for at, token in enumerate(ids):
        stopped = watcher.append(token)
        shown.append(watcher.take())
        if stopped:
            return watcher, at, [*shown, watcher.finish()]
    return watcher, None, [*shown, watcher.finish()]


def first_stop(
    tokenizer: Tokenizer, ids: Sequence[int], stops: Sequence[str], min_tokens: int = 0
) -> tuple[int | None, str]:
    """The definition, by brute force: the first token after which the text so far contains a stop string."""
    for at in range(max(0, min_tokens - 1), len(ids)):
        text = tokenizer.decode(ids[: at + 1])
        found = [text.find(stop) for stop in stops if stop in text]
        if found:
            return at, text[: min(found)]
    return None, tokenizer.decode(ids)


def test_a_stop_over_several_tokens_is_found_at_its_last(byte_level_tokenizer: Tokenizer) -> None:
    ids = byte_level_tokenizer.encode("keep this;;;END and nothing more")
    watcher, at, shown = watch(byte_level_tokenizer, ids, [";;;END"])
    assert at is not None and byte_level_tokenizer.decode(ids[: at + 1]).endswith(";;;END")
    assert watcher.text == "".join(shown) == "keep this" and watcher.matched == ";;;END"


def test_a_stop_inside_a_token_cuts_the_token(byte_level_tokenizer: Tokenizer) -> None:
    (token,) = byte_level_tokenizer.encode(" branch")
    watcher, at, _ = watch(byte_level_tokenizer, [token, token], ["an"])
    assert at == 0 and watcher.text == " br"


def test_text_that_may_become_a_stop_is_held_back_and_released(byte_level_tokenizer: Tokenizer) -> None:
    ids = byte_level_tokenizer.encode("a\n\nb", add_special=False)
    watcher = StopStrings(["\n\nUser:"], Detokenizer(byte_level_tokenizer))
    shown = []
    for token in ids:
        assert not watcher.append(token)
        shown.append(watcher.take())
    assert shown[0] == "a" and shown[-1] == "\n\nb" and not any(shown[1:-1])
    assert watcher.finish() == "" and watcher.text == "a\n\nb"


def test_held_back_text_is_given_out_at_the_end(byte_level_tokenizer: Tokenizer) -> None:
    watcher = StopStrings(["END"], Detokenizer(byte_level_tokenizer))
    for token in byte_level_tokenizer.encode("the EN"):
        watcher.append(token)
    assert watcher.take() == "the " and watcher.text == "the EN" and watcher.finish() == "EN"


def test_the_earliest_of_several_stops_cuts(byte_level_tokenizer: Tokenizer) -> None:
    (token,) = byte_level_tokenizer.encode(" branch")
    assert watch(byte_level_tokenizer, [token], ["ch", "ra", "an"])[0].text == " b"


def test_a_stop_that_is_the_beginning_of_another_wins(byte_level_tokenizer: Tokenizer) -> None:
    ids = byte_level_tokenizer.encode("x##y")
    watcher, at, _ = watch(byte_level_tokenizer, ids, ["##y", "##"])
    assert watcher.text == "x" and byte_level_tokenizer.decode(ids[: (at or 0) + 1]).startswith("x##")


def test_a_byte_token_that_is_a_stop_ends_the_text_at_once(byte_fallback_tokenizer: Tokenizer) -> None:
    by_name = {token: token_id for token_id, token in byte_fallback_tokenizer.vocabulary().items()}
    ids = [by_name["a"], by_name["<0x0A>"], by_name["a"]]
    watcher, at, _ = watch(byte_fallback_tokenizer, ids, ["\n"])
    assert at == 1 and watcher.text == "a"


def test_stops_are_not_looked_for_before_min_tokens(byte_level_tokenizer: Tokenizer) -> None:
    (token,) = byte_level_tokenizer.encode(" branch")
    assert watch(byte_level_tokenizer, [token] * 5, ["bra"], min_tokens=3)[1] == 2


def test_appending_after_the_stop_changes_nothing(byte_level_tokenizer: Tokenizer) -> None:
    (token,) = byte_level_tokenizer.encode(" branch")
    watcher, _, _ = watch(byte_level_tokenizer, [token], ["ch"])
    assert watcher.append(token) and watcher.text == " bran" and watcher.take() == ""


def test_without_stops_everything_is_shown_at_once(byte_level_tokenizer: Tokenizer) -> None:
    ids = byte_level_tokenizer.encode("nothing stops here")
    watcher, at, shown = watch(byte_level_tokenizer, ids, [])
    assert at is None and shown[:-1] == [byte_level_tokenizer.decode([token]) for token in ids]
    assert watcher.text == "nothing stops here"


@pytest.mark.parametrize("seed", range(4))
def test_random_texts_stop_where_the_definition_says(tokenizer: Tokenizer, seed: int) -> None:
    draw = random.Random(seed)
    hits = 0
    for _ in range(120):
        ids = [draw.randrange(3, tokenizer.vocabulary_size) for _ in range(25)]
        whole = tokenizer.decode(ids)
        starts = [draw.randrange(len(whole)) for _ in range(3)]
        stops = [stop for stop in (whole[s : s + draw.randrange(1, 6)] for s in starts) if "\ufffd" not in stop] or [
            "none"
        ]
        watcher, at, shown = watch(tokenizer, ids, stops)
        expected = first_stop(tokenizer, ids, stops)
        assert (at, watcher.text) == expected, (ids, stops)
        assert "".join(shown) == watcher.text
        hits += at is not None
    assert hits > 60


@pytest.mark.parametrize("kind", ["characters", "half a character", "bad bytes"])
def test_stops_over_a_long_run_of_bytes_cost_no_more_a_token(byte_fallback_tokenizer: Tokenizer, kind: str) -> None:
    """A text in a script without tokens: one run of bytes, of which nothing is final before it ends."""
    by_name = {token: token_id for token_id, token in byte_fallback_tokenizer.vocabulary().items()}
    text = {"characters": "日本".encode() * 300, "half a character": "日".encode() * 600 + b"\xe6"}
    spelled = text.get(kind, b"\xff" * 1800)
    counting = CountingDecoder(byte_fallback_tokenizer)
    watcher = StopStrings(["END", "本本"], Detokenizer(counting))
    for byte in spelled:
        watcher.append(by_name[f"<0x{byte:02X}>"])
    watcher.finish()
    assert not watcher.stopped
    assert counting.decoded < 64 * len(spelled)


def test_stops_in_runs_of_bytes_are_found_where_the_definition_says(byte_fallback_tokenizer: Tokenizer) -> None:
    by_name = {token: token_id for token_id, token in byte_fallback_tokenizer.vocabulary().items()}
    draw, hits = random.Random(3), 0
    for _ in range(200):
        spelled = "".join(draw.choices("aé€😀 ", k=30)).encode()
        ids = [by_name[f"<0x{byte:02X}>"] for byte in spelled]
        stops = ["".join(draw.choices("aé€😀 ", k=draw.randrange(2, 5))) for _ in range(3)]
        if least := draw.choice((0, 40)):  # nothing was shown before
            stops.append("é")
        else:
            ids.insert(draw.randrange(len(ids)), by_name["a"])
        watcher, at, shown = watch(byte_fallback_tokenizer, ids, stops, least)
        if at is not None:
            assert (at, watcher.text) == first_stop(byte_fallback_tokenizer, ids, stops, least), (ids, stops)
            hits += 1
        assert "".join(shown) == watcher.text
    assert hits > 60
