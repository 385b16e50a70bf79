"""What all routes of one server share.

Owns nothing but that list, and the name under which the model is served.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from starlette.requests import Request

from specbranch.async_engine import AsyncLLM
from specbranch.kept_text import KeptHead
from specbranch.serve.connections import Connections
from specbranch.serve.errors import ApiError
from specbranch.serve.keeping import Keeper
from specbranch.serve.limits import Limits
from specbranch.serve.metrics import ServerMetrics
from specbranch.serve.settings import ServerSettings
from specbranch.serve.spelling import Spelling
from specbranch.serve.text_work import TextWork
from specbranch.serve.tools import AnswerFormats


@dataclass(frozen=True, slots=True)
class Serving:
    """An engine, and everything that its routes use."""

    engine: AsyncLLM
    settings: ServerSettings
    model: str
    limits: Limits
    connections: Connections
    metrics: ServerMetrics
    spelling: Spelling
    formats: AnswerFormats  # of tool calls and reasoning
    keeper: Keeper | None = None  # of what is served; None: nothing is kept
    parsing: TextWork = field(default_factory=TextWork)  # of bodies
    tokenizing: TextWork = field(default_factory=TextWork)  # of texts that were admitted
    since: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, engine: AsyncLLM, settings: ServerSettings) -> Serving:
        """Put it together."""
        model = settings.model_name or Path(engine.target).name
        counts = Limits(settings), Connections(settings), ServerMetrics(model)
        formats = AnswerFormats.of(engine.tokenizer, settings)
        spelling, keeper = Spelling(engine.tokenizer), _keeper(engine, settings)
        return cls(engine, settings, model, *counts, spelling, formats, keeper)

    def check_model(self, name: str | None) -> None:
        """Refuse a model's name that is not served. A request without a name is accepted."""
        if name is not None and name != self.model:
            said = f"There is no model {name!r:.200} here; this server has {self.model!r}."
            raise ApiError(404, said, code="model_not_found", param="model")


def _keeper(engine: AsyncLLM, settings: ServerSettings) -> Keeper | None:
    """Return what keeps served texts, if that is asked for."""
    if settings.keep_text is None:
        return None
    head = KeptHead(Path(engine.target).name, engine.tokenizer.fingerprint, engine.vocabulary)
    return Keeper(settings.keep_text, settings.keep_text_limit, head)


def serving_of(request: Request) -> Serving:
    """Return the `Serving` of a request's server."""
    found: Serving = request.app.state.serving
    return found
