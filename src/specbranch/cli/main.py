"""`specbranch`: finds the command, and turns errors into sentences.

Owns the list of commands and the exit codes: 0 done, 1 a check failed, 2 an error that the user can fix, 130
interrupted.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys

import click

import specbranch.lab.inflation.source  # noqa: F401 (registers inflated models)
from specbranch import __version__
from specbranch.errors import SpecBranchError, nearest

COMMANDS = {
    "generate": "specbranch.cli.generate:generate",
    "chat": "specbranch.cli.chat:chat",
    "serve": "specbranch.cli.serve:serve",
    "draft-worker": "specbranch.cli.draft_worker:draft_worker",
    "verify": "specbranch.cli.verify:verify",
    "trace": "specbranch.cli.trace:trace",
    "distill": "specbranch.cli.distill:distill",
    "export": "specbranch.cli.export:export",
    "inflate": "specbranch.cli.inflate:inflate",
    "train-predictor": "specbranch.cli.train_predictor:train_predictor",
    "draft-eval": "specbranch.cli.draft_eval:draft_eval",
    "analyze": "specbranch.cli.analyze:analyze",
    "bench": "specbranch.cli.bench:bench",
    "profile": "specbranch.cli.profile:profile",
    "tune": "specbranch.cli.tune:tune",
    "doctor": "specbranch.cli.doctor:doctor",
    "models": "specbranch.cli.models:models",
}


class Lazy(click.Group):
    """A group whose commands are imported when they are needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All commands, in the order a newcomer needs them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command."""
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Offer the nearest name for one that does not exist."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            raise click.UsageError(
                f"No command {args[0]!r}.{nearest(args[0], COMMANDS)} Commands: {', '.join(COMMANDS)}.", ctx
            )
        return super().resolve_command(ctx, args)


@click.group(cls=Lazy, context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=False)
@click.version_option(__version__, prog_name="specbranch")
@click.option("--debug", is_flag=True, help="Show the traceback of an error; may stand anywhere.")
def cli(debug: bool) -> None:
    """Lossless speculative decoding with branches: one answer from a large language model, sooner.

    \b
    Try:
      specbranch generate "The three laws of robotics are"
      specbranch chat
      specbranch generate --method specbranch --target BIG --draft SMALL "Once upon a time"
      specbranch models

    Without --pair, --target and --draft the default pair is used. Its target SmolLM2-135M-Instruct is fetched once
    (93 MB) into the cache folder; its draft ships with the package.
    """


def main() -> None:
    """Run the command line; never returns."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.WARNING)  # messages below that level go to progress lines
    logging.basicConfig(format="%(message)s", level=logging.WARNING, handlers=[handler])
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code."""
    arguments, debug = _without_debug(arguments)
    try:
        return int(cli.main(args=arguments, prog_name="specbranch", standalone_mode=False) or 0)
    except click.exceptions.Exit as exit_:
        return exit_.exit_code
    except click.ClickException as error:
        error.show()
        return 2
    except (KeyboardInterrupt, click.Abort):
        print("\nInterrupted.", file=sys.stderr)
        return 130
    except SpecBranchError as error:
        if debug:
            raise
        print(f"Error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # Whoever read our output has enough (`| head`); keep Python from complaining once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _without_debug(arguments: list[str]) -> tuple[list[str], bool]:
    """Remove --debug wherever it stands, so that it need not come before the command; arguments after '--' are no
    options."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options = [argument for argument in arguments[:end] if argument != "--debug"]
    return options + arguments[end:], len(options) < end


if __name__ == "__main__":
    main()
