"""The loaded pair of this process, shared by all of its conversations, threads and event loops.

Owns loading and closing. Invariant: a pair is closed only when no answer uses it. If another pair is wanted while
answers run, the first one is closed after the last of them.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from llm_specbranch.options import ModelChoice

if TYPE_CHECKING:
    from specbranch import AsyncLLM


@dataclass(slots=True)
class Engine:
    """A loaded pair, and how many answers use it."""

    choice: ModelChoice
    loaded: AsyncLLM
    users: int = 0


class Engines:
    """Keeps the pair that was used last."""

    def __init__(self) -> None:
        self._changing = threading.Lock()  # held while a pair loads, too: the next caller wants it loaded
        self._kept: Engine | None = None

    @contextmanager
    def using(self, choice: ModelChoice) -> Iterator[AsyncLLM]:
        """Load a pair, unless it is loaded, and keep it open for the block."""
        engine = self._take(choice)
        try:
            yield engine.loaded
        finally:
            self._give_back(engine)

    def load(self, choice: ModelChoice) -> None:
        """Load a pair, unless it is loaded."""
        with self.using(choice):
            pass

    def close(self) -> None:
        """Close the kept pair; answers that still run are cancelled. What was learned of it is saved."""
        with self._changing:
            engine, self._kept = self._kept, None
            if engine is not None:
                engine.loaded.shut_down(drain=False)

    def _take(self, choice: ModelChoice) -> Engine:
        """Return the pair of that choice, with one more user."""
        with self._changing:
            if self._kept is None or self._kept.choice != choice or not self._kept.loaded.is_alive:
                engine, self._kept = self._kept, None
                if engine is not None and engine.users == 0:
                    engine.loaded.shut_down()
                self._kept = Engine(choice, load_pair(choice))
            self._kept.users += 1
            return self._kept

    def _give_back(self, engine: Engine) -> None:
        """End one use; close the pair if it was the last one and another pair is kept."""
        with self._changing:
            engine.users -= 1
            if engine is not self._kept and engine.users == 0:
                engine.loaded.shut_down()


def load_pair(choice: ModelChoice) -> AsyncLLM:
    """Load the models of a choice. Kernels of a GPU are compiled when they are first needed: `llm` often asks once."""
    from specbranch import LLM, AsyncLLM

    named = asdict(choice)
    context_length = named.pop("context_length")
    return AsyncLLM(LLM(**named, warm_up="lazy", options={"context_length": context_length}))


ENGINES = Engines()
atexit.register(ENGINES.close)
