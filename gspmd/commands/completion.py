"""Print a script that completes commands, their flags, and the values of flags with a few choices.

    source <(gspmd completion bash)  # in ~/.bashrc
    source <(gspmd completion zsh)   # in ~/.zshrc
    gspmd completion fish | source   # in ~/.config/fish/config.fish

The script has the flags of this version; renew it after an update.
"""

import argparse
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from shutil import get_terminal_size

from gspmd.commands import (
    compile_settings,
    configs,
    described,
    explain_settings,
    export_settings,
    generate_settings,
    layouts,
    page,
    settings,
)  # fmt: skip
from gspmd.commands.arguments import Parser
from gspmd.commands.main import COMMANDS
from gspmd.commands.search import settings as search_settings
from gspmd.hardware.chips import CHIPS
from gspmd.layouts.read import preset_names
from gspmd.moe.config import MoEConfig
from gspmd_models.config import ModelConfig


@dataclass(frozen=True)
class Words:
    """The words that may follow a command.

    Attributes:
        flags: the flags of the command, each with its possible values if there are few.
        words: words that are not flags, such as subcommands.
    """

    flags: Mapping[str, Sequence[str]] = field(default_factory=dict)
    words: Sequence[str] = ()


def parse(argv: Sequence[str], script: str = "") -> argparse.Namespace:
    """Parse the flags.

    Args:
        argv: the flags.
        script: unused, because no file in scripts/ runs this command.
    """
    return make_parser().parse_args(argv)


def make_parser() -> Parser:
    """Return the parser, whose argument is the name of a shell."""
    introduction = configs.fitted(__doc__.strip(), get_terminal_size().columns)
    layout = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="gspmd completion", description=introduction, formatter_class=layout)
    parser.add_argument("shell", choices=[*SCRIPTS], help=f"one of {', '.join(SCRIPTS)}", metavar="SHELL")
    return parser


def run(argv: Sequence[str], script: str = "", settings: argparse.Namespace | None = None) -> int:
    """Print the completion script; return the exit code, which is 2 for a shell that is not supported.

    Args:
        argv: the flags.
        script: unused; see `parse`.
        settings: the settings, if the flags have been parsed already.
    """
    print(SCRIPTS[(settings or parse(argv)).shell](known()), end="")
    return 0


def known() -> dict[str, Words]:
    """Return the words of every command, and of its subcommands, such as "layouts check"."""
    model = ModelConfig(moe=MoEConfig())
    tables = {
        "train": settings.RunSettings(model=model),
        "generate": generate_settings.GenerateSettings(),
        "export": export_settings.ExportSettings(),
        "search": search_settings.SearchSettings(model=model),
        "compile": compile_settings.CompileSettings(model=model),
    }
    found = {name: Words(_with_names(described.flags_of(type(table), table))) for name, table in tables.items()}
    parsers = {
        "explain": explain_settings.make_parser("explain"), "layouts": layouts.make_parser(),
        "page": page.make_parser(), "completion": make_parser(),
    }  # fmt: skip
    for name, parser in parsers.items():
        found[name] = Words(_with_names(parser.flags), parser.words or [*parser.subcommands])
        for sub, each in parser.subcommands.items():
            found[f"{name} {sub}"] = Words(_with_names(each.flags), each.words)
    help = {"--help": (), "--help-all": ()}
    return {name: replace(words, flags={**help, **words.flags}) for name, words in found.items()}


def _with_names(flags: Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
    """Return flags with their possible values, including names of configurations, layouts and chips."""
    named: dict[str, Sequence[str]] = {"--chip": [*CHIPS]}
    named["--config"] = sorted(path.stem for path in configs.FOLDER.glob("*.toml"))
    named |= {flag: preset_names() for flag in ("--layout", "--prefill-layout", "--decode-layout")}
    return {flag: named.get(flag, values) for flag, values in flags.items()}


def bash(known: Mapping[str, Words]) -> str:
    """Return the script for bash: a function that looks up the command and the previous word."""
    commands = [f"        {shlex.quote(name)})\n{_bash_of(words)}            ;;" for name, words in known.items()]
    pairs = "|".join(shlex.quote(name) for name in known if " " in name)
    return _BASH.format(commands=" ".join(COMMANDS), pairs=pairs, cases="\n".join(commands))


def _bash_of(words: Words) -> str:
    valued = [
        f"                {flag}) words={shlex.quote(' '.join(each))} ;;" for flag, each in words.flags.items() if each
    ]
    lines = [
        f"            flags={shlex.quote(' '.join(words.flags))}",
        f"            words={shlex.quote(' '.join(words.words))}",
        *(['            case "$before" in', *valued, "            esac"] if valued else []),
    ]
    return "\n".join(lines) + "\n"


_BASH = """\
_gspmd() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}"
    local command="${{COMP_WORDS[1]}}" flags="" words=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{commands} --help --version" -- "$current"))
        return
    fi
    if [ "$COMP_CWORD" -gt 2 ]; then
        case "$command ${{COMP_WORDS[2]}}" in
            {pairs}) command="$command ${{COMP_WORDS[2]}}" ;;
        esac
    fi
    case "$command" in
{cases}
    esac
    case "$current" in
        -*) COMPREPLY=($(compgen -W "$flags" -- "$current")) ;;
        *) COMPREPLY=($(compgen -W "$words" -- "$current") $(compgen -f -- "$current")) ;;
    esac
}}
complete -o filenames -F _gspmd gspmd
"""


def zsh(known: Mapping[str, Words]) -> str:
    """Return the script for zsh, which runs the script for bash."""
    return f"autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n{bash(known)}"


def fish(known: Mapping[str, Words]) -> str:
    """Return the script for fish, which has a line for each flag."""
    lines = [
        f"complete -c gspmd -n __fish_use_subcommand -f -a {name} -d {shlex.quote(does)}"
        for name, does in COMMANDS.items()
    ]
    for name, words in known.items():
        command, _, sub = name.partition(" ")
        seen = f"__fish_seen_subcommand_from {command}" + (f"; and __fish_seen_subcommand_from {sub}" if sub else "")
        begin = f"complete -c gspmd -n {shlex.quote(seen)}"
        if words.words:
            lines.append(f"{begin} -a {shlex.quote(' '.join(words.words))}")
        for flag, values in words.flags.items():
            given = f" -x -a {shlex.quote(' '.join(values))}" if values else ""
            lines.append(f"{begin} -l {flag.removeprefix('--')}{given}")
    return "\n".join(lines) + "\n"


SCRIPTS = {"bash": bash, "zsh": zsh, "fish": fish}
"""Shells, with the function that writes the script for each."""
