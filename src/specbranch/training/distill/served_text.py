"""Texts that a server kept, as material: which are trained on, which are held out, and what they are mixed with.

Owns the choice; the files are those of `kept_text.py`. Invariants: whether a text is held out depends on a hash of its
prompt alone, so it stays held out however often a draft learns. A conversation's later turns hold its earlier ones, so
all of them are on one side.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch

from specbranch.errors import BadParameter
from specbranch.kept_text import KeptText, fitted, read_kept
from specbranch.training.distill.material import Material

log = logging.getLogger("specbranch")

SERVED_HELD_OUT = 0.15  # share of the prompts that is never trained on
# Share of the original material in what is trained on. Served texts are few and of few kinds: alone they are learned by
# heart, and other kinds get worse. Set by reasoning, not measured.
REPLAY_SHARE = 0.5
TURN_TOKENS = 4  # of an answer, by which a later turn of its conversation is known
MOST_REPEATS = 8  # of original material, where it is less than the served texts
_FACTOR, _MODULUS = 1_000_003, (1 << 61) - 1  # of the rolling hash of beginnings


@dataclass(frozen=True, slots=True)
class ServedText:
    """What a server kept, in two parts."""

    training: Material
    held_out: Material


def served_text(folder: Path, vocabulary: str, most: int) -> ServedText:
    """Read kept texts of one tokenizer, each cut to `most` tokens; a text that was kept twice counts once."""
    texts, others = list[KeptText](), 0
    for head, text in read_kept(folder):
        if head.vocabulary == vocabulary:
            texts.append(text)
        else:
            others += 1
    texts = list(dict.fromkeys(reversed(texts)))[::-1]  # of equal ones the newest place counts
    if others:
        log.warning("%d texts in %s are of another tokenizer than this target's, and are left out.", others, folder)
    held_out = _held_out(texts)
    if not any(held_out) or all(held_out):
        raise BadParameter(
            f"{folder} holds {len(texts)} texts of this target's tokenizer with {len(set(_roots(texts)))} prompts; "
            "expected two prompts or more. Serve more with --keep-text first."
        )
    texts = [fitted(text.prompt, text.answer, most) for text in texts]  # cut last: sides go by whole prompts
    sides = ([text for text, out in zip(texts, held_out, strict=True) if out is side] for side in (False, True))
    training, apart = (_material(side, folder) for side in sides)
    return ServedText(training, apart)


def mixed(served: Material, original: Material, most: int, seed: int) -> Material:
    """Return both kinds of material with REPLAY_SHARE of the tokens from the original one.

    `most`: tokens of either; of served texts the newest are taken. The smaller part is repeated: served texts as often
    as it takes, original ones MOST_REPEATS times at most, behind which fewer served ones are taken.
    """
    order = torch.randperm(len(original), generator=torch.Generator().manual_seed(seed))
    original = original.select(_first_tokens(original.lengths, order.tolist(), most))
    room = int(original.tokens.numel() * MOST_REPEATS * (1 / REPLAY_SHARE - 1))
    newest = range(len(served))[::-1]
    served = served.select(_first_tokens(served.lengths, newest, min(most, room)))
    ratio = original.tokens.numel() * (1 / REPLAY_SHARE - 1) / served.tokens.numel()
    repeats = max(round(ratio), 1)
    parts = [served] * repeats + [original] * max(min(round(1 / ratio), MOST_REPEATS), 1)
    return Material.join(parts, {"served": len(served), "original": len(original), "repeats": repeats})


def steps_of(mix: Material, passes: int, rows: int, length: int) -> int:
    """Return the training steps in which each served text of a mix is read so many times."""
    return math.ceil(passes / int(mix.about["repeats"]) * mix.tokens.numel() / (rows * length))


def _first_tokens(lengths: torch.Tensor, order: Sequence[int], most: int) -> torch.Tensor:
    """Return the first conversations in an order that have `most` tokens together, and at least one."""
    chosen, held = list[int](), 0
    for at in order:
        held += int(lengths[at])
        if chosen and held > most:
            break
        chosen.append(at)
    return torch.tensor(chosen, dtype=torch.int64)


def _held_out(texts: Sequence[KeptText]) -> list[bool]:
    """Choose by the hash of each conversation's first prompt; at least one prompt is held out."""
    shares = [_share(root) for root in _roots(texts)]
    least = min(shares, default=0.0)
    return [share < SERVED_HELD_OUT or share == least for share in shares]


def _share(prompt: Sequence[int]) -> float:
    digest = sha256(" ".join(map(str, prompt)).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _roots(texts: Sequence[KeptText]) -> list[tuple[int, ...]]:
    """Return the prompt with which each text's conversation has begun: that of the shortest text which its own prompt
    goes on with."""
    begun = {_rolled((*text.prompt, *text.answer[:TURN_TOKENS]))[-1]: text.prompt for text in texts}
    return [next((begun[one] for one in _rolled(text.prompt) if one in begun), text.prompt) for text in texts]


def _rolled(tokens: Sequence[int]) -> list[int]:
    """Return a hash of each beginning."""
    found, value = list[int](), 0
    for token in tokens:
        value = (value * _FACTOR + token + 1) % _MODULUS
        found.append(value)
    return found


def _material(texts: Sequence[KeptText], folder: Path) -> Material:
    tokens = [token for text in texts for token in (*text.prompt, *text.answer)]
    lengths = torch.tensor([0, *(len(text.prompt) + len(text.answer) for text in texts)])
    answers = torch.tensor([len(text.prompt) for text in texts])
    return Material(torch.tensor(tokens, dtype=torch.int32), lengths.cumsum(0), answers, {"served": folder.name})
