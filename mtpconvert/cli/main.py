"""The command group, and how errors become messages and exit codes. Commands are imported when they are called."""

from __future__ import annotations

import importlib
import sys
import traceback
from itertools import pairwise

import click

from mtpconvert import __version__
from mtpconvert.errors import MtpConvertError

COMMANDS = {
    "hf2mcore": "Hugging Face -> Megatron checkpoint.",
    "mcore2hf": "Megatron checkpoint -> Hugging Face.",
    "audit": "Say whether RIGHT is what LEFT became, byte for byte, MTP by name.",
    "inspect": "What a checkpoint holds, from its headers.",
    "plan": "What would move where, from headers.",
    "roundtrip": "HF -> Megatron -> HF in a temporary directory; every byte compared.",
    "args": "The Megatron-LM flags of a model, from its config.json.",
    "mappings": "List, show, check and draft the mapping files.",
    "parity": "The real transformers and megatron-core on the same tokens, layer by layer.",
    "accept": "Draft acceptance of the MTP layers, run by transformers.",
    "slice": "A smaller, still valid checkpoint: first layers, first experts, MTP kept.",
}

INTERNAL_ERROR = 70  # sysexits.h: EX_SOFTWARE; no promise of docs/command-line.md covers it


class _Lazy(click.Group):
    """Knows its commands by name; ``--help`` imports none of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"mtpconvert.cli.{cmd_name}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.command(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mtpconvert")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@click.pass_context
def main(ctx: click.Context, debug: bool) -> None:
    """Convert Megatron-Core <-> Hugging Face checkpoints, audit any two, never lose MTP layers silently."""
    ctx.obj = {"debug": debug}


def run(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with the code that docs/command-line.md promises."""
    sys.exit(call(sys.argv[1:] if arguments is None else arguments))


def call(arguments: list[str]) -> int:
    """Run the command line; the exit code. Messages go to stderr, an error of JSON runs to stdout as well."""
    debug = "--debug" in arguments
    try:
        code = main.main(arguments, prog_name="mtpconvert", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except MtpConvertError as error:
        if debug:
            traceback.print_exc()
        click.echo(f"mtpconvert: error: {error}", err=True)
        _document(arguments, type(error).__name__, error.exit_code, error.what, error.where, error.next_step)
        return error.exit_code
    except (click.exceptions.Abort, KeyboardInterrupt):
        click.echo("mtpconvert: interrupted; nothing stands under the final name", err=True)
        return 130
    except click.ClickException as error:
        error.show()
        _document(arguments, "UsageError", 2, error.format_message(), None, "mtpconvert COMMAND --help shows the usage")
        return 2
    except click.exceptions.Exit as error:
        return error.exit_code
    except BrokenPipeError:
        return 1
    except Exception as error:
        if debug:
            raise
        what, next_step = f"{type(error).__name__}: {error}", "run 'mtpconvert --debug ...' and report it"
        click.echo(f"mtpconvert: internal error: {what}", err=True)
        click.echo(f"  next:  this is a fault of mtpconvert; {next_step}", err=True)
        _document(arguments, "InternalError", INTERNAL_ERROR, what, None, next_step)
        return INTERNAL_ERROR


def _document(arguments: list[str], kind: str, code: int, what: str, where: str | None, next_step: str | None) -> None:
    """The error as the one JSON document on stdout, if the arguments ask for JSON."""
    if "--json" in arguments or "--format=json" in arguments or ("--format", "json") in pairwise(arguments):
        import json

        error = {"kind": kind, "exit_code": code, "what": what, "where": where, "next_step": next_step}
        click.echo(json.dumps({"error": error}, indent=2))
