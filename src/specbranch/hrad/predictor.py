"""A trained predictor and its folder: `predictor.safetensors` holds the weights, `predictor.json` says what it was
trained for.

Owns the format of the folder. It does not own training. Invariant: a folder that loads holds exactly what was saved,
because the JSON has the digest of the weights. A predictor for another pair is refused before it computes anything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from specbranch.errors import ModelError
from specbranch.files import spoken
from specbranch.hrad.network import Network
from specbranch.models.files.disk import RESUME, write_durably

PREDICTOR_FORMAT = "specbranch-predictor"
PREDICTOR_VERSION = 1
PREDICTOR_WEIGHTS, CARD = "predictor.safetensors", "predictor.json"
MOST_LAYERS, MOST_LENGTH, MOST_HIDDEN = 64, 64, 1 << 16


class PredictorError(ModelError):
    """A predictor that is missing, damaged or for something else; decoding can do without one."""


@dataclass(frozen=True, slots=True)
class About:
    """What a predictor was trained for, and how it did."""

    target: str
    target_identity: str
    draft: str
    draft_identity: str
    longest: int  # the longest draft that it covers (γ)
    layers: int  # last layers of the target whose hidden states it takes (K)
    hidden: int  # their width
    figures: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def width(self) -> int:
        """The number of features: the hidden states, and the embedding of the token they led to."""
        return (self.layers + 1) * self.hidden


@dataclass(frozen=True, slots=True)
class Predictor:
    """A network and what it is for."""

    about: About
    network: Network
    digest: str = ""  # of its weights

    def save(self, folder: Path) -> None:
        """Write the folder. The JSON comes last, so a folder that has one is whole."""
        tensors = {name: tensor.detach().cpu().to(torch.float16) for name, tensor in self.network.state_dict().items()}
        for name in ("mean", "scale", "sharpness", "shift"):  # a few numbers, of any size
            tensors[name] = self.network.state_dict()[name].detach().cpu().float()
        data = save({name: tensor.contiguous() for name, tensor in tensors.items()})
        card = {
            "format": PREDICTOR_FORMAT,
            "version": PREDICTOR_VERSION,
            "weights_sha256": sha256(data).hexdigest(),
            **asdict(self.about),
        }
        with spoken(folder, RESUME):
            (folder / CARD).unlink(missing_ok=True)
        write_durably(folder / PREDICTOR_WEIGHTS, data)
        write_durably(folder / CARD, (json.dumps(card, indent=1) + "\n").encode())

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Load a folder; refuse a damaged one."""
        card = _card(folder)
        about, expected = _about(folder, card), card.get("weights_sha256")
        try:
            data = (folder / PREDICTOR_WEIGHTS).read_bytes()
        except OSError as error:
            raise PredictorError(
                f"The predictor in {folder} cannot be read ({error.strerror}: {PREDICTOR_WEIGHTS}). Train it again."
            ) from None
        if sha256(data).hexdigest() != expected:
            raise PredictorError(
                f"{folder / PREDICTOR_WEIGHTS} is not what {CARD} says it is: it was changed or damaged. "
                "Fetch or train it again."
            )
        try:
            held = load(data)
            if held["first.weight"].shape[-1] != about.width or held["shift"].shape[-1] != about.longest:
                raise RuntimeError("its sizes are others")
            network = Network(about.width, about.longest)
            network.load_state_dict({name: tensor.float() for name, tensor in held.items()})
        except (SafetensorError, RuntimeError, KeyError) as error:
            reason = str(error).splitlines()[0]
            raise PredictorError(
                f"{folder / PREDICTOR_WEIGHTS} does not hold the network that {CARD} tells of: {reason}. "
                "Train it again."
            ) from None
        if not all(bool(torch.isfinite(tensor).all()) for tensor in network.state_dict().values()):
            raise PredictorError(f"{folder / PREDICTOR_WEIGHTS} holds numbers that are not finite. Train it again.")
        return cls(about, network.eval(), str(expected)[:16])

    def check_pair(self, target_identity: str, draft_identity: str | None) -> None:
        """Refuse another pair than it was trained for."""
        about = self.about
        for what, name, own, theirs in (
            ("target", about.target, about.target_identity, target_identity),
            ("draft", about.draft, about.draft_identity, draft_identity),
        ):
            if own != theirs:
                raise PredictorError(
                    f"The predictor was trained for the {what} {name} ({own}), not for this one ({theirs or 'none'}). "
                    "Train one for this pair with `specbranch train-predictor`."
                )


def _card(folder: Path) -> dict[str, Any]:
    path = folder / CARD
    try:
        card = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PredictorError(
            f"There is no predictor to be read in {folder} ({error}). Expected a folder that `specbranch "
            "train-predictor` wrote."
        ) from None
    if not isinstance(card, dict) or card.get("format") != PREDICTOR_FORMAT:
        raise PredictorError(
            f"{path} does not tell of a predictor. Expected a folder that `specbranch train-predictor` wrote."
        )
    if card.get("version") != PREDICTOR_VERSION:
        raise PredictorError(
            f"{path} is of version {card.get('version')}, this program reads version {PREDICTOR_VERSION}. "
            "Train the predictor again."
        )
    return card


def _about(folder: Path, card: Mapping[str, Any]) -> About:
    try:
        about = About(**{one.name: card[one.name] for one in fields(About)})
    except KeyError as error:
        raise PredictorError(f"{folder / CARD} lacks {error}. Train the predictor again.") from None
    for name, most in (("longest", MOST_LENGTH), ("layers", MOST_LAYERS), ("hidden", MOST_HIDDEN)):
        value = getattr(about, name)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise PredictorError(
                f"{folder / CARD}: {name} is {value!r}; expected a whole number from 1 to {most}. Train it again."
            )
    return about
