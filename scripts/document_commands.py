"""Renew docs/commands.md, every command with its flags, from their parsers: `python scripts/document_commands.py`."""

import argparse
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from gspmd.commands import (
    compile_settings,
    completion,
    described,
    explain_settings,
    export_settings,
    generate_settings,
    layouts,
    page,
    settings,
)
from gspmd.commands.arguments import Parser
from gspmd.commands.described import Flag
from gspmd.commands.main import COMMANDS
from gspmd.commands.search import settings as search_settings
from gspmd.moe.config import MoEConfig
from gspmd_models.config import LatentConfig, ModelConfig

PAGE = Path(__file__).parents[1] / "docs" / "commands.md"
TABLED = {
    "train": (settings, settings.RunSettings),
    "generate": (generate_settings, generate_settings.GenerateSettings),
    "export": (export_settings, export_settings.ExportSettings),
    "search": (search_settings, search_settings.SearchSettings),
    "compile": (compile_settings, compile_settings.CompileSettings),
}
"""Commands with settings, each with the module and the dataclass of its settings."""
MODEL = "model."
_TOP = """# Commands

Every command with its flags; those that `--help` shows come first, and `--help-all` shows the others too. Without
`--config`, `gspmd train` reads configs/default.toml, which sets some flags to values other than the defaults below;
`gspmd train --help` shows these values. This page is generated: `python scripts/document_commands.py`.
"""
_OF_MODEL = """## Flags of a model

`gspmd train`, `gspmd search` and `gspmd compile` take each field of [model] as a flag. Flags of a table within it,
such as `--model.moe.experts`, need that table in the file of `--config`.
"""


def page_of_commands() -> str:
    """Return the text of docs/commands.md."""
    parsers = {
        "explain": explain_settings.make_parser("explain"),
        "page": page.make_parser(),
        "layouts": layouts.make_parser(),
        "completion": completion.make_parser(),
    }
    parts = [_TOP]
    for name, does in COMMANDS.items():
        parts.append(f"## gspmd {name}\n\n{does[:1].upper()}{does[1:]}.\n")
        parts += _of_parser(parsers[name]) if name in parsers else _of_settings(*TABLED[name])
    tables = {f"{MODEL}moe.": MoEConfig(), f"{MODEL}latent.": LatentConfig()}
    model = [*described.every_flag(ModelConfig, ModelConfig(), MODEL)]
    model = [flag for flag in model if flag.field not in ("moe", "latent", "lora")]  # These are None by default.
    model += [flag for table, of in tables.items() for flag in described.every_flag(type(of), of, table)]
    parts += [_OF_MODEL, *_tables(model, ())]
    return "\n".join(parts)


def _of_settings(module: Any, cls: type) -> Iterator[str]:
    """Yield the examples of a command, and its flags except the flags of the model."""
    yield from (f"```text\n{_dedented(part)}\n```\n" for part in module.__doc__.split("\n\n") if part[:4] == "    ")
    flags = [*described.every_flag(cls, cls())]
    if any(flag.table.startswith(MODEL) for flag in flags):
        yield "Also [the flags of a model](#flags-of-a-model).\n"
    yield from _tables([flag for flag in flags if not flag.table.startswith(MODEL)], getattr(module, "COMMON", ()))


def _dedented(part: str) -> str:
    return "\n".join(line[4:] for line in part.splitlines())


def _tables(flags: Iterable[Flag], common: Collection[str]) -> Iterator[str]:
    """Yield tables of flags: the common flags, then the other flags, then the flags of each table of settings."""
    groups: dict[str, list[str]] = {}
    for flag in sorted(flags, key=lambda flag: (flag.field not in common or bool(flag.table), flag.table)):
        kind = "Common" if flag.field in common and not flag.table else "Others" if common else "Flags"
        groups.setdefault(f"[{flag.table[:-1]}]" if flag.table else kind, []).append(_row(flag))
    for title, rows in groups.items():
        yield f"**{title}**\n\n| flag | default | what it does |\n| --- | --- | --- |\n" + "\n".join(rows) + "\n"


def _row(flag: Flag) -> str:
    values = f" {', '.join(flag.choices)}" if flag.choices else ""
    name = f"`{flag.name}{values}`" + (f", `{flag.off}`" if flag.off else "")
    plain = isinstance(flag.default, str | int | float) and not isinstance(flag.default, bool) and flag.default != ""
    default = f"`{flag.default}`" if plain else ("on" if flag.default else "off") if flag.off else ""
    return f"| {name} | {default} | {_escaped(flag.text)} |"


def _of_parser(parser: Parser) -> Iterator[str]:
    """Yield the examples, arguments and subcommands of a command that has an argparse parser."""
    parts = (parser.description or "").split("\n\n")
    yield from (f"```text\n{_dedented(part)}\n```\n" for part in parts if part[:4] == "    ")
    if rows := [*_rows(parser)]:
        yield "| flag | what it does |\n| --- | --- |\n" + "\n".join(rows) + "\n"
    for name, sub in parser.subcommands.items():
        does = sub.description or ""
        yield f"### {parser.prog} {name}\n\n{does[:1].upper()}{does[1:]}.\n"
        yield "| flag | what it does |\n| --- | --- |\n" + "\n".join(_rows(sub)) + "\n"


def _rows(parser: Parser) -> Iterator[str]:
    for action in parser._actions:  # argparse has no public list of them.
        if action.help in (None, argparse.SUPPRESS) or isinstance(action, argparse._HelpAction):
            continue
        named = [*action.option_strings] or [str(action.metavar or action.dest)]
        text = _escaped(str(action.help) % {"default": action.default, "prog": parser.prog})
        yield f"| {', '.join(f'`{name}`' for name in named)} | {text[:1].upper()}{text[1:].rstrip('.')}. |"


def _escaped(text: str) -> str:
    """Return a text with the characters escaped that Markdown would read as markup in a cell of a table."""
    return re.sub(r"([|*<\[\]])", r"\\\1", " ".join(text.split()))


if __name__ == "__main__":
    PAGE.write_text(page_of_commands())
