"""`Decoding`: how one request is decoded.

Owns the resolved settings of a request and the method they name. It holds no model and no session. Invariant: the
models it was made for can run it; every mistake in the settings was refused before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from specbranch.config import SpeculativeConfig
from specbranch.core.experience import Experience
from specbranch.core.methods import PLAIN, Method, MethodRounds, best_fit
from specbranch.core.rounds import given
from specbranch.core.session import Session
from specbranch.errors import BadParameter
from specbranch.experiences import Experiences

Settings = SpeculativeConfig | Mapping[str, Any] | None
Speculative = Settings | Literal[False]  # of one request; False: plain decoding


@dataclass(frozen=True, slots=True)
class Decoding:
    """One way to decode: the settings, their method, and the statistics of earlier requests with these settings."""

    config: SpeculativeConfig  # resolved: it names its method
    method: Method
    experiences: Experiences  # keeps only the latest, so a request takes its experience when it starts
    wants_forecast: bool = False  # each verdict carries H-RAD's signals

    @property
    def name(self) -> str:
        """The method's name."""
        return self.config.method or PLAIN

    @property
    def experience(self) -> Experience:
        """The statistics that requests with these settings have shown so far."""
        return self.experiences.of(self.config)

    def start(self, session: Session, forced: Sequence[int] = ()) -> MethodRounds:
        """Start the rounds of a session. The answer starts with the `forced` tokens, whatever the target would choose;
        then the method decodes."""

        def decode() -> MethodRounds:
            return self.method.start(session, self.config, self.experience)

        return given(session, forced, decode) if forced else decode()


def resolve(speculative: Speculative, method: str | None, has_draft: bool) -> SpeculativeConfig:
    """Return complete settings that name their method.

    `method` wins over the one in `speculative`. If neither names one, it is "specbranch" with a draft, else "auto".
    Raises a BadParameter for what these models cannot do.
    """
    if speculative is False:
        speculative, method = None, method or PLAIN
    _, config = best_fit(_settings(speculative, method), has_draft)
    if config.policy == "oracle":
        raise BadParameter(
            "Policy 'oracle' knows the target's text beforehand, which only a replay does: `specbranch bench run "
            "--clock`."
        )
    return config


def _settings(given: Settings, method: str | None) -> SpeculativeConfig:
    if given is not None and not isinstance(given, (SpeculativeConfig, Mapping)):
        raise BadParameter(f"speculative is {given!r:.60}; expected a SpeculativeConfig or a mapping.")
    config = given if isinstance(given, SpeculativeConfig) else SpeculativeConfig.from_dict(given or {})
    return replace(config, method=method) if method is not None else config
