"""`specbranch serve`: an OpenAI-compatible server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from specbranch.cli.options import DRAFT, PAIR, SPECULATION, TABLES, TARGET, load_llm, with_options
from specbranch.cli.sections import PATH, SectionedCommand, options_of
from specbranch.errors import BadParameter
from specbranch.extras import FASTAPI, UVICORN

_server, _keys, _limits = (options_of(title) for title in ("Server", "Keys", "Limits"))


@click.command(cls=SectionedCommand, tables=TABLES)
@_server("--host", default="127.0.0.1", metavar="ADDRESS", help="Address to listen on [127.0.0.1: this machine only].")
@_server("--port", type=int, default=8000, metavar="N", help="Port to listen on; 0 takes a free one [8000].")
@_server("--model-name", metavar="NAME", help="Model name that clients use [the target's name].")
@_server(
    "--allow-host",
    "allowed_hosts",
    multiple=True,
    metavar="NAME",
    help="Host name that clients may use for this server, e.g. behind a proxy; may be repeated [any; "
    "on 127.0.0.1 only that].",
)
@_server(
    "--tool-call-parser",
    metavar="NAME",
    help="Format of tool calls, in which they are read and forced: hermes, qwen3_coder, llama3_json or mistral [the "
    "one that the chat template shows].",
)
@_server(
    "--reasoning-parser",
    metavar="NAME",
    help="Format of reasoning, behind which grammars begin: think (<think>), mistral ([THINK]), or none: it stays part "
    "of the text [the one that the chat template shows].",
)
@_server("--log-text", is_flag=True, help="Log prompts and answers; by default no log line contains either.")
@_keys("--keys", type=PATH, metavar="FILE", help="Serve only clients that have a key in this file.")
@_keys(
    "--new-key",
    metavar="NAME",
    help="Create a key called NAME, add its hash to --keys FILE, print the key once, and exit.",
)
@_keys("--without-keys", is_flag=True, help="Allow an address that others can reach without keys.")
@_limits("--max-batch", type=int, metavar="N", help="Maximum batch size; memory may allow less [64].")
@_limits(
    "--max-queue", type=int, metavar="N", help="Maximum number of answers in the queue; further requests get 429 [256]."
)
@_limits(
    "--max-per-key",
    type=int,
    metavar="N",
    help="Maximum number of requests of one key at a time; further ones get 429 [64].",
)
@_limits(
    "--max-tokens", type=int, metavar="N", help="Maximum number of tokens in an answer [as many as the context holds]."
)
@_limits("--max-body", type=int, metavar="BYTES", help="Maximum size of a request body [4194304].")
@_limits("--max-connections", type=int, metavar="N", help="Maximum number of open connections [1024].")
@_limits(
    "--max-per-address",
    type=int,
    metavar="N",
    help="Maximum number of open connections of one address; a proxy counts as one [256].",
)
@_limits(
    "--read-timeout", type=float, metavar="S", help="Seconds to receive a header, and then a body at 16 KB/s [20]."
)
@_limits("--timeout", type=float, metavar="S", help="Seconds within which a request must be answered [600].")
@_limits("--grace", type=float, metavar="S", help="Seconds for running answers to finish when the server stops [60].")
@with_options(PAIR, TARGET, DRAFT, SPECULATION)
def serve(new_key: str | None, without_keys: bool, **given: Any) -> None:
    """Serve the models over the OpenAI API. On Ctrl-C or SIGTERM the server finishes running answers and stops.

    \b
    specbranch serve
    specbranch serve --target BIG --draft SMALL --executor process --model-name big
    specbranch serve --keys keys.txt --new-key alice
    specbranch serve --keys keys.txt --host 0.0.0.0

    \b
    Then, in another terminal:
      curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \\
        -d '{"messages": [{"role": "user", "content": "Why is the sky blue?"}]}'

    OpenAI clients take http://127.0.0.1:8000/v1 as their base URL. A browser shows a page at http://127.0.0.1:8000, and
    Prometheus reads metrics at /metrics. See docs/serving.md.
    """
    for extra in (FASTAPI, UVICORN):
        extra.require()
    if new_key is not None:
        click.echo(_made(given["keys"], new_key))
        return
    from specbranch.serve.settings import ServerSettings

    names = ServerSettings.__dataclass_fields__
    settings = ServerSettings(**{name: given[name] for name in names if given.get(name) is not None})
    _check_open(settings.is_local, settings.keys, without_keys, settings.host)
    if settings.keys is not None:
        from specbranch.serve.keys import KeyFile

        KeyFile(settings.keys)  # report its errors before the models are loaded
    from specbranch.serve.run import bound
    from specbranch.serve.run import serve as run

    sockets = bound(settings)  # a port that is taken is noticed before the models are loaded, too
    run(load_llm(given), settings, sockets)


def _made(file: Path | None, name: str) -> str:
    from specbranch.serve.keys import new_key

    if file is None:
        raise BadParameter("--new-key needs --keys FILE: the file to which the key's hash is added.")
    return new_key(file, name)


def _check_open(is_local: bool, keys: Path | None, without_keys: bool, host: str) -> None:
    if not is_local and keys is None and not without_keys:
        raise BadParameter(
            f"--host {host} lets others ask, and there are no keys. Make one (--keys FILE --new-key NAME) and serve "
            "with --keys FILE; or say --without-keys."
        )
