"""Settings of a server: where it listens, what the model is called, what it admits.

Owns their names, defaults and checks. It holds nothing of a request.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from specbranch.errors import BadParameter, unknown
from specbranch.exec.address import is_loopback
from specbranch.text.tools.formats import FORMAT_ALIASES, FORMATS, NO_REASONING, REASONING

MOST_SAMPLES = 128  # of one request: n times its prompts
MOST_LOGPROBS = 20  # of the likeliest tokens reported at a position
MOST_STOPS, LONGEST_STOP = 128, 256  # texts, and characters: each is searched for at every token, while others wait
MOST_BIASES = 1024  # tokens: each is written into every row
MOST_STOP_IDS = 1024  # tokens that end an answer
MOST_TOOLS, MOST_NAME = 256, 128  # of a request, and characters of a function's name
LEAST_KEPT_BYTES = 1 << 16  # of --keep-text-limit: some long texts
LONGEST_SETTING = 365 * 86400.0  # seconds: longer ones are mistakes, and beyond what threads can wait


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How a server behaves."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: Path | None = None  # a unix socket to listen at, instead of host and port
    uds_mode: str = "600"  # who may open it, in octal digits
    model_name: str | None = None  # None: the target's own
    keys: Path | None = None  # a file of hashed keys; None: everybody who reaches the server may use it
    admin_keys: Path | None = None  # the same for what changes the server; None: nobody may
    allowed_hosts: tuple[str, ...] = ()  # host names under which it may be addressed besides its own
    max_queue: int = 256  # samples that may wait besides those of the batch
    max_batch: int = 64  # the maximum batch size, in samples
    max_tokens: int | None = None  # the most that one answer may have; None: what the context holds
    max_body: int = 4 * 2**20  # bytes
    max_per_key: int = 64  # requests of one key at a time
    max_connections: int = 1024  # open at a time
    max_per_address: int = 256  # of them from one address; a proxy is one
    read_timeout: float = 20.0  # seconds for the header of a request, and then for its body (16 KB/s are enough)
    timeout: float = 600.0  # seconds in which a request has to be answered
    grace: float = 60.0  # seconds that running answers have once the server is stopped
    log_text: bool = False  # log prompts and answers
    keep_text: Path | None = None  # a folder for the tokens of what is served; None: nothing is kept
    keep_text_limit: int = 256 * 2**20  # bytes of that folder
    otlp_traces_endpoint: str | None = None  # where traces are sent; None: where OpenTelemetry's variables say
    tool_call_parser: str | None = None  # the format of tool calls; None: the one that the chat template shows
    reasoning_parser: str | None = None  # the format of reasoning; None: the one that the chat template shows

    def __post_init__(self) -> None:
        for name in ("max_queue", "max_batch", "max_body", "max_per_key", "max_connections", "max_per_address"):
            if getattr(self, name) < 1:
                raise BadParameter(f"{name} is {getattr(self, name)!r}; expected a whole number ≥ 1.")
        for name in ("read_timeout", "timeout", "grace"):
            if not 0 < getattr(self, name) <= LONGEST_SETTING:
                said = f"{name} is {getattr(self, name)!r}; expected seconds above 0 and at most"
                raise BadParameter(f"{said} {LONGEST_SETTING:.0f} (a year).")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise BadParameter(f"max_tokens is {self.max_tokens!r}; expected a whole number ≥ 1, or nothing.")
        _check_name("tool call parser", self.tool_call_parser, (*FORMATS, *FORMAT_ALIASES))
        _check_name("reasoning parser", self.reasoning_parser, (*REASONING, NO_REASONING))
        if not re.fullmatch("[0-7]{3}", self.uds_mode):
            raise BadParameter(f"uds_mode is {self.uds_mode!r}; expected three octal digits, such as 660.")
        url = self.otlp_traces_endpoint
        if url is not None and not re.match(r"https?://[^/\s]", url):
            said = f"otlp_traces_endpoint is {url!r:.80}; expected an address such as"
            raise BadParameter(f"{said} http://localhost:4318/v1/traces.")
        if self.keep_text_limit < LEAST_KEPT_BYTES:
            said = f"keep_text_limit is {self.keep_text_limit!r}; expected bytes, at least {LEAST_KEPT_BYTES}."
            raise BadParameter(said)
        if self.admin_keys is not None and _are_one_file(self.admin_keys, self.keys):
            raise BadParameter(
                f"keys and admin_keys are both {self.keys}, so every client could change the server. Make another "
                "file: specbranch serve --keys FILE --new-key NAME, then --admin-keys FILE."
            )
        if not 0 <= self.port <= 65535:
            raise BadParameter(f"port is {self.port}; expected one from 0 (any that is free) to 65535.")

    @property
    def is_local(self) -> bool:
        """True if only this machine can reach the server."""
        return self.uds is not None or is_loopback(self.host)


def _check_name(what: str, name: str | None, known: Collection[str]) -> None:
    if name is not None and name not in known:
        raise unknown(what, name, known)


def _are_one_file(first: Path, other: Path | None) -> bool:
    """True if both names are of one file, also by a link."""
    if other is None:
        return False
    return first == other or (first.exists() and other.exists() and first.samefile(other))
