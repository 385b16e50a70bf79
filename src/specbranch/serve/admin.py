"""Routes that change a running server; each needs a key of `--admin-keys`, see `keys.py`.

Owns `/admin/draft`. It does not own the exchange (`draft_exchange.py`). Invariant: whatever is wrong with a draft, the
one at work goes on, and the answer is a sentence.
"""

from __future__ import annotations

import logging
import time

from fastapi import APIRouter
from starlette.requests import Request

from specbranch.errors import BadParameter, ModelError
from specbranch.serve.bodies import CheckedRoute
from specbranch.serve.errors import ApiError
from specbranch.serve.protocol import DraftRequest, DraftResponse
from specbranch.serve.serving import serving_of

router = APIRouter(route_class=CheckedRoute)
log = logging.getLogger("specbranch.serve")


@router.post("/admin/draft", response_model=DraftResponse)
async def exchange_draft(asked: DraftRequest, request: Request) -> DraftResponse:
    """Load another draft while requests run, and exchange it between two rounds."""
    started = time.monotonic()
    try:
        await serving_of(request).engine.exchange_draft(asked.draft)
    except (BadParameter, ModelError, OSError) as error:
        said = f"The draft stays as it was: {error}"
        raise ApiError(400, said, code="draft_not_taken", param="draft") from None
    log.warning("The draft was exchanged for %s.", asked.draft)
    return DraftResponse(draft=asked.draft, seconds=round(time.monotonic() - started, 3))
