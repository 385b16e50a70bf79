"""What all routes of one server share.

Owns nothing but the list of it, and under which name the model is served.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from starlette.requests import Request

from specbranch.async_engine import AsyncLLM
from specbranch.serve.errors import ApiError
from specbranch.serve.limits import Limits
from specbranch.serve.metrics import ServerMetrics
from specbranch.serve.settings import ServerSettings
from specbranch.serve.spelling import Spelling


@dataclass(frozen=True, slots=True)
class Serving:
    """An engine, and what stands around it."""

    engine: AsyncLLM
    settings: ServerSettings
    model: str
    limits: Limits
    metrics: ServerMetrics
    spelling: Spelling
    since: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, engine: AsyncLLM, settings: ServerSettings) -> Serving:
        """Put it together."""
        model = settings.model_name or Path(engine.target).name
        return cls(engine, settings, model, Limits(settings), ServerMetrics(model), Spelling(engine.tokenizer))

    def check_model(self, name: str | None) -> None:
        """Refuse a name that is not served; none is ours."""
        if name is not None and name != self.model:
            said = f"There is no model {name!r:.200} here; this server has {self.model!r}."
            raise ApiError(404, said, code="model_not_found", param="model")


def serving_of(request: Request) -> Serving:
    """Return what the server of a request has."""
    found: Serving = request.app.state.serving
    return found
