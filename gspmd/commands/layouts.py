"""List layouts, show their lines, check them for a model and a mesh, and compare two of them.

    gspmd layouts list
    gspmd layouts show megatron-1d --toml > own.toml
    gspmd layouts show megatron-1d --svg layout.svg
    gspmd layouts keys attention
    gspmd layouts check own.toml --config llama-2-70b --mesh x=8,y=4,z=4
    gspmd layouts diff megatron-1d own.toml

A layout is a preset's name or the path of a TOML file. None of these commands starts JAX or needs a device.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from shutil import get_terminal_size

from rich.markup import escape

from gspmd.annotate.errors import LayoutError, SpecError, suggestion
from gspmd.commands import pictures
from gspmd.commands.arguments import Parser, dimension_sizes, mesh_sizes
from gspmd.commands.configs import fitted
from gspmd.commands.messages import told
from gspmd.display.console import console
from gspmd.display.tables import Column, Sheet, counted
from gspmd.display.units import mesh_text
from gspmd.layouts import Layout
from gspmd.layouts.printed import lines_of
from gspmd.layouts.read import preset_names, text_of
from gspmd.layouts.rules.keys import KEYS, PARTS, PIPELINE, of_part
from gspmd.training.toml import ConfigError

SECTIONS = (*PARTS, PIPELINE)


def parse(argv: Sequence[str], script: str = "") -> argparse.Namespace:
    """Parse the flags; the attribute `does` of the result is the function that runs the subcommand.

    Args:
        argv: the flags.
        script: unused, because no file in scripts/ runs this command.
    """
    return make_parser().parse_args(argv)


def make_parser() -> Parser:
    """Return the parser of the subcommands and their flags."""
    described = fitted(__doc__.strip(), get_terminal_size().columns)
    layout = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="gspmd layouts", description=described, formatter_class=layout)
    commands = parser.add_subparsers(title="subcommands", metavar="SUBCOMMAND", required=True)

    def add(name: str, does: object, helps: str) -> Parser:
        sub = commands.add_parser(name, help=helps, description=helps)
        sub.set_defaults(does=does, all=False)
        return sub

    add("list", list_presets, "list the presets, from no communication to the most specialized")
    show = add("show", show_layout, "print the lines of a layout")
    show.add_argument("layout", values=preset_names(), help="a preset's name, or a TOML file")
    show.add_argument("--toml", action="store_true", help="print its file, to begin one of your own with")
    pictures.add_flags(show, "the layout")
    keys = add("keys", list_keys, "list the keys that a layout may have, with their dimensions")
    keys.add_argument("section", values=SECTIONS, nargs="?", help=f"one of {', '.join(SECTIONS)}")
    check = add("check", check_layout, "check a layout for the sizes of a model, on a mesh or a number of devices")
    check.add_argument("layout", values=preset_names(), help="a preset's name, or a TOML file")
    check.add_argument("--all", action="store_true", help="print every fault, not only the first ones")
    check.add_argument("--set", action="append", default=[], metavar="KEY=SPEC", help="one change; repeatable")
    check.add_argument("--mesh", type=mesh_sizes, help="sizes of the mesh axes, such as x=4,y=2")
    check.add_argument(
        "--devices", type=int, help="number of devices; the factor in the layout's [mesh] makes a mesh of them"
    )
    check.add_argument(
        "--sizes", type=dimension_sizes, default={}, help="sizes of the dimensions, such as B=512,E=18432"
    )
    check.add_argument("--config", help="TOML file, or a shipped configuration, whose sizes are checked")
    check.add_argument("--model", metavar="MODULE:NAME", help="a custom model, whose sizes are checked")
    check.add_argument("--batch", type=int, help="sequences; by default those of the config, or of gspmd train")
    check.add_argument("--length", type=int, help="tokens of a sequence, with the same default")
    diff = add("diff", diff_layouts, "list the lines in which two layouts differ; exit code 1 if there are any")
    diff.add_argument("a", metavar="LAYOUT", values=preset_names(), help="a preset's name, or a TOML file")
    diff.add_argument("b", metavar="OTHER", values=preset_names(), help="another one")
    parser.subcommands = commands.choices
    return parser


def run(argv: Sequence[str], script: str = "", settings: argparse.Namespace | None = None) -> int:
    """Run `gspmd layouts`; return its exit code, which is 1 if layouts differ and 2 for bad input.

    Args:
        argv: the flags.
        script: unused; see `parse`.
        settings: the settings, if the flags have been parsed already.
    """
    options = settings or parse(argv)
    try:
        return options.does(options)
    except (LayoutError, SpecError, ConfigError) as error:
        print(f"{type(error).__name__}: {error}" if options.all else told(error), file=sys.stderr)
        return 2


def list_presets(options: argparse.Namespace) -> int:
    """Print each preset with its mesh axes and the first sentence of its file."""
    sheet = Sheet("", [Column("layout"), Column("mesh axes", goes=1), Column("what it shards", folds=True)])
    for name in preset_names():
        sheet.add(name, ", ".join(Layout.load(name).axes) or "none", escape(_summary(text_of(name))))
    console().print(sheet)
    return 0


def _summary(text: str) -> str:
    """Return the first sentence of the comment at the top of a layout file, without the layout's name."""
    head = " ".join(
        line.removeprefix("#").strip() for line in text.split("\n\n")[0].splitlines() if line.startswith("#")
    )
    return re.split(r"(?<=[.]) ", head.partition(": ")[2] or head)[0]


def show_layout(options: argparse.Namespace) -> int:
    """Print a layout section by section, or print the text of its file; write pictures of the layout if asked to."""
    if faults := [*pictures.faults_of(options)]:
        print(f"gspmd layouts show: {faults[0]}", *faults[1:], sep="\n", file=sys.stderr)
        return 2
    layout = Layout.load(options.layout)
    print(text_of(options.layout).rstrip() if options.toml else layout)
    faults = pictures.write(layout.figure(), options) if pictures.asked(options) else []
    for fault in faults:
        print(f"gspmd layouts show: {fault}", file=sys.stderr)
    return 2 if faults else 0


def list_keys(options: argparse.Namespace) -> int:
    """Print the keys of one section or of all sections."""
    if options.section and options.section not in SECTIONS:
        near = suggestion(options.section, SECTIONS)
        raise LayoutError(f"no section is called {options.section!r}.\n  {near}Sections: {', '.join(SECTIONS)}.")
    columns = [Column("key"), Column("dimensions"), Column("kind", goes=1), Column("meaning", folds=True)]
    sheet = Sheet("", columns)
    for part in [options.section] if options.section else SECTIONS:
        for key in of_part(part):
            dims = key.dims if isinstance(key.dims, str) else ", ".join(str(KEYS[name].dims) for name in key.dims)
            sheet.add(key.name, dims, key.kind, escape(key.meaning))
    console().print(sheet)
    return 0


def check_layout(options: argparse.Namespace) -> int:
    """Check a layout for faults, and print the mesh and the sizes for which it has none."""
    changes = [change.partition("=") for change in options.set]
    if wrong := [f"{''.join(each)!r}" for each in changes if not all(each)]:
        fault = f"--set reads KEY=SPEC, such as ffn.w_in=E_xF_y, not {', '.join(wrong)}."
        raise ConfigError("cannot read the changes:", [fault])
    layout = Layout.load(options.layout).override({key: spec for key, _, spec in changes})
    sizes = _sizes(options, layout)
    mesh = options.mesh
    if options.devices is not None:
        if mesh:
            raise ConfigError(
                "cannot choose a mesh:", ["--mesh already gives the number of devices; leave --devices out."]
            )
        mesh = layout.mesh_for(options.devices, sizes)
    layout.check(sizes or None, mesh)
    what = [f"on {mesh_text(mesh)}"] if mesh else []
    if sizes:
        what.append(f"for {', '.join(f'{dim}={size}' for dim, size in sizes.items())}")
    found = layout.resolved(sizes or None, mesh)
    print(f"{layout.name}: {counted(len(layout.table), 'line')}, no fault {' '.join(what)}".rstrip() + ".")
    print(*found.chosen, sep="\n", end="\n" * bool(found.chosen))
    return 0


def _sizes(options: argparse.Namespace, layout: Layout) -> dict[str, int]:
    """Return the sizes for checking a layout: the sizes of a model, overridden by --sizes."""
    sizes: dict[str, int] = {}
    if options.config or options.model:
        from gspmd.commands.file import file_of, is_own, source_length_of

        file, _ = file_of(
            [f"--{name}={value}" for name in ("config", "model") if (value := getattr(options, name))], ""
        )
        given = {name: value for name in ("batch", "length") if (value := getattr(options, name)) is not None}
        training = replace(file.training, **given)
        if is_own(file):
            from gspmd.commands import own  # This imports JAX, as the model has done already.

            sizes = own.subject(file).sizes(training.batch, training.length)
        else:
            sizes = file.model.sizes(training.batch, training.length, source_length_of(file))
    elif options.batch is not None or options.length is not None:
        raise ConfigError("cannot read the sizes:", ["--batch and --length are for --config; write --sizes B=8,L=128."])
    return sizes | options.sizes


def diff_layouts(options: argparse.Namespace) -> int:
    """Print the lines in which two layouts differ; return 1 if they differ, and otherwise 0."""
    a, b = Layout.load(options.a), Layout.load(options.b)
    rows = [*_differing(a, b)]
    if not rows:
        print(f"{a.name} and {b.name} have the same lines.")
        return 0
    sheet = Sheet("", [Column("line"), Column(escape(a.name), folds=True), Column(escape(b.name), folds=True)])
    for row in rows:
        sheet.add(*map(escape, row))
    console().print(sheet)
    return 1


def _differing(a: Layout, b: Layout) -> Iterator[tuple[str, str, str]]:
    """Yield the key and both specs of each line that differs.

    Lines of the first layout come first, in its order. Lines that only the second layout has follow.
    """
    ours, theirs = lines_of(a), lines_of(b)
    for key in dict.fromkeys((*ours, *theirs)):
        if ours.get(key) != theirs.get(key):
            yield key, ours.get(key, "–"), theirs.get(key, "–")
