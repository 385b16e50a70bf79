"""`specbranch serve`: an OpenAI-compatible server."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specbranch.cli.options import (
    DRAFT,
    JSON_OPTION,
    METHOD_OPTIONS,
    PAIR,
    TABLES,
    TARGET,
    llm_arguments,
    load_llm,
    load_options,
    speculative_config,
    with_options,
)
from specbranch.cli.sections import PATH, SectionedCommand, options_of
from specbranch.cli.settings_sources import effective, settled, sourced
from specbranch.errors import BadParameter
from specbranch.extras import FASTAPI, RAY, UVICORN

if TYPE_CHECKING:
    from specbranch.cluster.settings import Scale
    from specbranch.serve.settings import ServerSettings

_server, _keys, _limits, _replicas = (options_of(title) for title in ("Server", "Keys", "Limits", "Replicas"))
VARIABLES = "SPECBRANCH_SERVE_"  # how the environment variables of the options begin


@click.command(cls=SectionedCommand, tables=TABLES)
@_server(
    "--config",
    type=PATH,
    metavar="FILE",
    is_eager=True,
    callback=sourced(VARIABLES),
    help="File of options, in YAML, TOML or JSON; a file of `specbranch tune` is one, too. Its keys are the names of "
    f"the options. An environment variable such as {VARIABLES}PORT overrides it, and the command line overrides both.",
)
@_server("--print-config", is_flag=True, help="Print all settings with their sources, in YAML, and exit.")
@_server("--host", default="127.0.0.1", metavar="ADDRESS", help="Address to listen on [127.0.0.1: this machine only].")
@_server("--port", type=int, default=8000, metavar="N", help="Port to listen on; 0 takes a free one [8000].")
@_server("--uds", type=PATH, metavar="PATH", help="Unix socket to listen at, instead of --host and --port.")
@_server(
    "--uds-mode",
    metavar="MODE",
    help="Who may open the unix socket, in octal digits: 660 lets its group, such as a proxy's [600].",
)
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
@_server(
    "--keep-text",
    type=PATH,
    metavar="DIR",
    help="Keep prompts and answers in this folder, as token ids, for `distill --from-served` [nothing is kept].",
)
@_server(
    "--keep-text-limit",
    type=int,
    metavar="BYTES",
    help="Maximum size of that folder; beyond it the oldest texts are deleted [268435456].",
)
@_server(
    "--otlp-traces-endpoint",
    metavar="URL",
    help="OpenTelemetry collector to send a span of each request to, such as http://localhost:4318/v1/traces "
    "[$OTEL_EXPORTER_OTLP_ENDPOINT, else none].",
)
@_keys("--keys", type=PATH, metavar="FILE", help="Serve only clients that have a key in this file.")
@_keys(
    "--new-key",
    metavar="NAME",
    help="Create a key called NAME, add its hash to --keys FILE, print the key once, and exit.",
)
@_keys(
    "--admin-keys",
    type=PATH,
    metavar="FILE",
    help="Let clients that have a key in this file change the server: POST /admin/draft exchanges the draft.",
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
@_replicas(
    "--replicas", type=int, metavar="N", help="Serve by N copies of the models behind this one address, on Ray [none]."
)
@_replicas("--max-replicas", type=int, metavar="N", help="Start up to N replicas if there are many requests [N].")
@_replicas(
    "--requests-per-replica",
    type=int,
    metavar="N",
    help="Running requests of a replica that --max-replicas aims at [half of --max-batch].",
)
@_replicas(
    "--replica-cpus", type=float, metavar="X", help="CPUs and threads of a replica [this machine's, divided evenly]."
)
@_replicas(
    "--replica-gpus", type=float, metavar="X", help="GPUs of a replica; 0.5 is half of one [divided evenly, 1 at most]."
)
@_replicas(
    "--ray",
    "ray_address",
    metavar="ADDRESS",
    help="Ray cluster to run replicas on: HOST:PORT, or auto for the one of this machine [Ray is started here].",
)
@with_options(PAIR, TARGET, DRAFT, (*METHOD_OPTIONS, JSON_OPTION))
@click.pass_context
def serve(context: click.Context, /, **_: Any) -> None:
    """Serve the models over the OpenAI API. On Ctrl-C or SIGTERM the server finishes running answers and stops.

    \b
    specbranch serve
    specbranch serve --target BIG --draft SMALL --executor process --model-name big
    specbranch serve --keys keys.txt --new-key alice
    specbranch serve --keys keys.txt --host 0.0.0.0
    specbranch serve --replicas 2
    specbranch serve --config serve.yaml --print-config

    \b
    Then, in another terminal:
      curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \\
        -d '{"messages": [{"role": "user", "content": "Why is the sky blue?"}]}'

    OpenAI clients take http://127.0.0.1:8000/v1 as their base URL. A browser shows a page at http://127.0.0.1:8000, and
    Prometheus reads metrics at /metrics. See docs/serving.md.
    """
    for extra in (FASTAPI, UVICORN):
        extra.require()
    given = settled(context)
    if given["new_key"] is not None:
        click.echo(_made(given["keys"], given["new_key"]))
        return
    from specbranch.serve.settings import ServerSettings

    names = ServerSettings.__dataclass_fields__
    settings = ServerSettings(**{name: given[name] for name in names if given.get(name) is not None})
    _check_open(settings.is_local, settings.keys, given["without_keys"], settings.host)
    speculative_config(given), load_options(given)  # refuse mistakes now
    if given["print_config"]:
        click.echo(effective(context, asdict(settings)))
        return
    _check_files(settings)
    scale = _scale(given)
    if scale is not None:
        _check_alone(settings)
    from specbranch.serve.run import bound
    from specbranch.serve.run import serve as run
    from specbranch.serve.tracing import Collector

    collector = Collector.of(settings)
    if collector is not None and collector.is_option:
        collector.check()
    sockets = bound(settings)  # a port that is taken is noticed before the models are loaded, too
    if scale is None:
        run(load_llm(given), settings, sockets)
        return
    from specbranch.cluster.run import serve_replicas

    serve_replicas(llm_arguments(given), settings, scale, sockets)


def _check_files(settings: ServerSettings) -> None:
    """Report errors of files and folders before the models are loaded."""
    from specbranch.serve.keeping import check_private
    from specbranch.serve.keys import KeyFile

    for keys in (settings.keys, settings.admin_keys):
        if keys is not None:
            KeyFile(keys)
    if settings.keep_text is not None:
        check_private(settings.keep_text)


def _check_alone(settings: ServerSettings) -> None:
    """Refuse what only a server without replicas does."""
    for option, given in (("--keep-text", settings.keep_text), ("--admin-keys", settings.admin_keys)):
        if given is not None:
            raise BadParameter(
                f"{option} works on a server without replicas: each replica would need a folder, or an exchange, of "
                "its own. Leave it out, or leave out --replicas."
            )


def _scale(given: dict[str, Any]) -> Scale | None:
    """Return how many replicas there are to be; None: the models run in this process."""
    from specbranch.cluster.settings import Scale

    values = {name: given[name] for name in Scale.__dataclass_fields__ if given.get(name) is not None}
    if not values:
        return None
    if "replicas" not in values:
        raise BadParameter(f"{', '.join(values)}: this needs --replicas N, the number of replicas that always run.")
    RAY.require()
    return Scale(**values)


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
