"""Where a draft worker is, and who may use it: addresses, the shared secret, certificate files.

Owns what users write (`tcp://HOST:PORT`, `tls://HOST:PORT`) and the environment variables of links. Connects nothing.
Invariant: an address that other machines can reach is refused without a secret.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

from specbranch.errors import BadParameter

KEY_VARIABLE = "SPECBRANCH_LINK_KEY"  # the shared secret
CA_VARIABLE = "SPECBRANCH_LINK_CA"  # a file of certificates that a target trusts, instead of the system's
SCHEMES = ("tcp", "tls")
BY_NAME = ("ray",)  # ray://NAME: draft workers that are found by a name (`finding`)
LEAST_KEY = 16  # characters of a secret: who overhears a greeting can try out short ones
EXPECTED = "expected tcp://HOST:PORT, or tls://HOST:PORT for a worker with a certificate"


@dataclass(frozen=True, slots=True)
class LinkAddress:
    """Where a draft worker listens."""

    host: str
    port: int
    tls: bool = False

    @classmethod
    def parse(cls, text: str) -> LinkAddress:
        """Read tcp://HOST:PORT or tls://HOST:PORT."""
        try:
            parts = urlsplit(text)
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if host is None or port is None or parts.scheme not in SCHEMES or parts.path or parts.query or parts.username:
            raise BadParameter(f"The draft worker's address is {text!r}; {EXPECTED}.")
        return cls(host, port, parts.scheme == "tls")

    @property
    def is_local(self) -> bool:
        """True if only this machine can be there."""
        return is_loopback(self.host)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'tls' if self.tls else 'tcp'}://{host}:{self.port}"


def is_link(draft: str | None) -> bool:
    """True if a draft's name is the address of a draft worker, a list of addresses, or a name to find workers by."""
    return draft is not None and draft.partition("://")[0] in (*SCHEMES, *BY_NAME) and "://" in draft


def is_loopback(host: str) -> bool:
    """Return True if a name or an address means this machine alone."""
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def link_key(address: LinkAddress, environment: Mapping[str, str] = os.environ) -> bytes:
    """Return the shared secret, empty if there is none; refuse a short one, and none for another machine."""
    key = environment.get(KEY_VARIABLE, "").strip().encode()
    if key and len(key) < LEAST_KEY:
        raise BadParameter(
            f"{KEY_VARIABLE} has {len(key)} characters; expected at least {LEAST_KEY}. Make one: openssl rand -hex 32"
        )
    if not key and not address.is_local:
        raise BadParameter(
            f"{address} is not this machine alone, so a link needs a secret. Set {KEY_VARIABLE} to the same value for "
            "worker and target, such as the output of: openssl rand -hex 32"
        )
    return key
