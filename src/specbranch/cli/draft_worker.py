"""`specbranch draft-worker`: a draft that targets in other processes or on other machines use."""

from __future__ import annotations

import logging
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specbranch.cli.options import DRAFT_WINDOW_OPTION, PAIR, TABLES, with_options
from specbranch.cli.sections import PATH, SectionedCommand, options_of
from specbranch.config import SpeculativeConfig
from specbranch.errors import BadParameter, ModelError
from specbranch.exec.address import CA_VARIABLE, KEY_VARIABLE, LinkAddress, link_key
from specbranch.exec.door import bound
from specbranch.pairs import chosen_models, draft_path

if TYPE_CHECKING:
    from specbranch.assembly import ModelChoice, ServedDraft
    from specbranch.core.warm_up import ForwardSizes

SESSIONS = 64  # that a GPU is warmed up for, at a time

TARGETS_GO_ON = "Stopped; targets go on without this draft."
DEFAULT_LISTEN = "127.0.0.1:7351"

_link, _ray, _model = (options_of(title) for title in ("Link", "Ray", "Draft"))


@click.command(cls=SectionedCommand, tables={"Pairs": TABLES["Pairs"]})
@_link(
    "--listen",
    metavar="HOST:PORT",
    help="Address to listen on; port 0 takes a free one. An address that other machines can reach needs a secret "
    "[127.0.0.1:7351: this machine only].",
)
@_link("--tls-cert", type=PATH, metavar="FILE", help="Certificate (PEM) to encrypt links with; targets say tls://.")
@_link("--tls-key", type=PATH, metavar="FILE", help="Private key of the certificate [in the same file].")
@_ray(
    "--on-ray",
    type=int,
    metavar="N",
    help="Start N draft workers as actors on Ray, on nodes with the resource 'draft'; targets say ray://NAME.",
)
@_ray("--ray-address", metavar="ADDRESS", help="Address of the Ray cluster [$RAY_ADDRESS, else one on this machine].")
@_ray("--ray-name", default="draft", metavar="NAME", help="Name by which targets find the workers [draft].")
@_ray("--gpus", type=float, default=0.0, metavar="N", help="GPUs of each worker, such as 1 or 0.25 [0].")
@with_options(PAIR)
@_model(
    "--draft",
    metavar="MODEL",
    help="Model to serve: a folder, a .gguf file, a Hub id, a known name, or a pair's name [the pair's draft].",
)
@_model("--draft-device", metavar="DEVICE", help="Device of the draft: cpu, cuda, cuda:1 … [a GPU if there is one].")
@_model(
    "--draft-weights",
    metavar="TYPE",
    help="Storage type of its weight matrices: float32, bfloat16, int8, fp8, fp8-block, int4, int4-64, int4-32 or "
    "stored [stored (on a GPU: int8) if its file is in int8, else --dtype].",
)
@_model("--draft-window", **DRAFT_WINDOW_OPTION)
@_model(
    "--target",
    metavar="MODEL",
    help="Target whose embedding and head a draft made by `distill` computes with; other drafts need none "
    "[the pair's].",
)
@_model("--dtype", metavar="TYPE", help="Compute precision [float32 on a CPU, else bfloat16].")
@_model("--context-length", type=int, metavar="N", help="Maximum number of tokens of a sequence [the model's].")
@_model(
    "--cache-tokens",
    type=int,
    metavar="N",
    help="KV cache slots, shared by the requests of all targets [as many as fit into memory].",
)
@_model("--vocabulary", type=int, metavar="N", help="Draft only token ids below N, for targets that have fewer [all].")
@_model("--threads", type=int, metavar="N", help="CPU threads [half of them if only this machine is served, else all].")
def draft_worker(
    listen: str | None, tls_cert: Path | None, tls_key: Path | None, on_ray: int | None, **given: Any
) -> None:
    """Serve a draft to targets in other processes or on other machines, until Ctrl-C or SIGTERM.

    \b
    On one machine, in two terminals:
      specbranch draft-worker
      specbranch generate --draft tcp://127.0.0.1:7351 "Once upon a time"

    \b
    On two machines, with a secret that both have and a certificate:
      export SPECBRANCH_LINK_KEY=$(openssl rand -hex 32)
      specbranch draft-worker --listen 0.0.0.0:7351 --tls-cert cert.pem --tls-key key.pem
    and where the target is, with the same SPECBRANCH_LINK_KEY:
      SPECBRANCH_LINK_CA=cert.pem specbranch serve --target BIG --draft tls://draft-machine:7351

    \b
    On a Ray cluster that runs, two workers for all targets in it:
      specbranch draft-worker --on-ray 2
      specbranch serve --target BIG --draft ray://draft

    Texts do not depend on the worker. If it is slow, gone or wrong, targets go on alone, and draft again when it is
    back. `specbranch doctor --draft tcp://HOST:PORT` says whether a link pays. One worker serves several targets, whose
    orders share its forwards. The secret keeps strangers out; only a certificate keeps others from reading along. See
    docs/links.md.
    """
    if on_ray is not None:
        if listen or tls_cert or tls_key:
            raise BadParameter("On Ray, workers choose their addresses. Leave --listen, --tls-cert and --tls-key out.")
        return _serve_on_ray(on_ray, given)
    address = _address(listen or DEFAULT_LISTEN, tls_cert, tls_key)
    key = link_key(address)
    from specbranch.exec.greeting import worker_context

    context = None if tls_cert is None else worker_context(tls_cert, tls_key)
    listener = bound(address)  # a port that is taken is noticed before the model is loaded
    draft = _loaded(given, address)
    from specbranch.exec.draft_server import DraftServer, WorkerFailed

    server = DraftServer(draft.drafter, draft.served, draft.tokens, listener, key, context, draft.evaluation)
    _log_to_terminal()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, server.stop)
    click.echo(_serving(draft, address, listener, bool(key)))
    try:
        server.run()
    except WorkerFailed as failed:
        raise ModelError(f"The draft fails again and again: {failed}. Start the worker anew.") from failed
    click.echo(TARGETS_GO_ON, err=True)
    return None


def _serve_on_ray(count: int, given: dict[str, Any]) -> None:
    """Have actors serve until a signal."""
    from functools import partial

    from specbranch.cluster.draft_actors import connect_ray, draft_actors, follow, load_draft

    connect_ray(given["ray_address"])
    target, draft = _models(given)
    load = partial(load_draft, _choice(draft, given, None), target, given["vocabulary"], _sizes())
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    with draft_actors(load, count, given["ray_name"], given["gpus"]):
        name = given["ray_name"]
        click.echo(f"{count} draft worker(s) on Ray for {draft}. Targets use them with --draft ray://{name}.")
        follow(name, click.echo, stopped)
    click.echo(TARGETS_GO_ON, err=True)


def _address(listen: str, certificate: Path | None, key: Path | None) -> LinkAddress:
    if key is not None and certificate is None:
        raise BadParameter("--tls-key is the private key of a certificate; give that, too: --tls-cert FILE.")
    try:
        return LinkAddress.parse(f"{'tls' if certificate else 'tcp'}://{listen}")
    except BadParameter:
        raise BadParameter(f"--listen is {listen!r}; expected HOST:PORT, such as 127.0.0.1:7351.") from None


def _loaded(given: dict[str, Any], address: LinkAddress) -> ServedDraft:
    from specbranch.assembly import make_served_draft
    from specbranch.cli.progress import narrated, pulled

    target, draft = _models(given)
    pulled(draft_path(draft))
    choice = _choice(draft, given, address)
    with narrated("Loading the draft"):
        return make_served_draft(choice, target, given["vocabulary"], _sizes())


def _models(given: dict[str, Any]) -> tuple[str, str]:
    target, draft = chosen_models(given["pair"], given["target"], given["draft"])
    if draft is None:
        raise BadParameter("A target alone was given; name the draft to serve with --draft, or a --pair.")
    return target, draft


def _sizes() -> ForwardSizes:
    from specbranch.core.methods import METHODS
    from specbranch.exec.forward_sizes import draft_sizes

    return draft_sizes(METHODS["specbranch"], SpeculativeConfig(method="specbranch"), SESSIONS)


def _choice(draft: str, given: dict[str, Any], address: LinkAddress | None) -> ModelChoice:
    from specbranch.assembly import ModelChoice, half_the_threads

    return ModelChoice(
        draft,
        device=given["draft_device"],
        dtype=given["dtype"],
        context_length=given["context_length"],
        threads=given["threads"] or (half_the_threads() if address is not None and address.is_local else None),
        shorten=True,
        cache_tokens=given["cache_tokens"],
        weights=given["draft_weights"],
        draft_window=given["draft_window"],
    )


def _serving(draft: ServedDraft, address: LinkAddress, listener: socket.socket, has_key: bool) -> str:
    port = listener.getsockname()[1]
    where = LinkAddress(address.host, port, address.tls)
    secret = f"with the secret of {KEY_VARIABLE}" if has_key else "without a secret"
    trust = f" They set {CA_VARIABLE} to its certificate, unless they trust it already." if address.tls else ""
    return f"Serving drafts of {draft.served.name} at {where}, {secret}. Targets use it with --draft {where}.{trust}"


def _log_to_terminal() -> None:
    """Show who comes and goes."""
    log = logging.getLogger("specbranch.draft_worker")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
