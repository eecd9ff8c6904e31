"""``mtpconvert audit LEFT RIGHT``: print the report, exit 1 when it fails."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from mtpconvert.cli.output import refuse_missing_folder, write_file

_FORMATS = ("text", "json", "junit", "sarif", "markdown", "html")


def _reports(_context: click.Context, _option: click.Parameter, given: tuple[str, ...]) -> list[tuple[str, Path]]:
    """``FORMAT=FILE`` as pairs. Raises click.BadParameter for another format or no file."""
    pairs = [text.partition("=") for text in given]
    if wrong := [text for text, (name, _, file) in zip(given, pairs, strict=True) if name not in _FORMATS or not file]:
        raise click.BadParameter(f"'{wrong[0]}' is not FORMAT=FILE with one of {', '.join(_FORMATS)}")
    return [(name, Path(file)) for name, _, file in pairs]


@click.command()
@click.argument("left", type=click.Path(path_type=Path))
@click.argument("right", type=click.Path(path_type=Path))
@click.option("--level", type=click.Choice(["headers", "bits"]), default="bits", show_default=True,
              help="headers: names, shapes, dtypes and configs; bits: every byte of every tensor too.")  # fmt: skip
@click.option(
    "--trained", is_flag=True, help="A training lies between the two: values must differ, the rest must hold."
)
@click.option("--format", "format_name", type=click.Choice(_FORMATS), default="text", show_default=True)
@click.option("--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the report to a file.")
@click.option("--report", "reports", multiple=True, metavar="FORMAT=FILE", callback=_reports,
              help="Write this report too; may be repeated. One audit, several reports.")  # fmt: skip
@click.option("--waivers", type=click.Path(path_type=Path, dir_okay=False), help="TOML file of accepted findings.")
@click.option("--fail-on", type=click.Choice(["error", "warning"]), default="error", show_default=True)
def audit(
    left: Path, right: Path, level: str, trained: bool, format_name: str,
    output: Path | None, reports: list[tuple[str, Path]], waivers: Path | None, fail_on: str,
) -> int:  # fmt: skip
    """Say whether RIGHT is what LEFT became: Hugging Face or Megatron on either side."""
    from mtpconvert.audit.api import audit as run
    from mtpconvert.audit.report import render
    from mtpconvert.audit.waivers import load_waivers

    for file in [*([] if output is None else [output]), *(file for _, file in reports)]:
        refuse_missing_folder(file)
    accepted = load_waivers(waivers) if waivers is not None else None
    report = run(left, right, level=level, trained=trained, waivers=accepted)
    for name, file in reports:
        write_file(file, render(report, name, fail_on))
    if output is not None:
        write_file(output, render(report, format_name, fail_on))
        click.echo(f"{report.verdict(fail_on)}: {output}", err=True)
    elif format_name == "text":
        from mtpconvert.audit.report.text import render as render_text

        click.echo(render_text(report, fail_on, color=sys.stdout.isatty()), nl=False, color=sys.stdout.isatty())
    else:
        click.echo(render(report, format_name, fail_on), nl=False)
    return 1 if report.verdict(fail_on) == "fail" else 0
