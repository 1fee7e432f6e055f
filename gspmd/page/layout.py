"""The answer of the page for a layout: time and traffic of a training step by equation, and memory per device."""

import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType

import gspmd
from gspmd.annotate.errors import LayoutError, NotationError, PlanError, SpecError, listed, shown, suggestion
from gspmd.annotate.spec import Spec
from gspmd.audit.offline.cuda import require_cuda_plugin
from gspmd.audit.offline.libtpu import require_libtpu
from gspmd.audit.offline.names import Named, read_name, shapes
from gspmd.display.units import amount_of_bytes, amount_of_flops, amount_of_seconds, mesh_text
from gspmd.hardware.chips import Chip, chip
from gspmd.layouts import Layout
from gspmd.layouts.read import is_path, preset_names
from gspmd.lowerings.in_force import lowering, planned_for
from gspmd.page import limits
from gspmd.page.equation import inline
from gspmd.page.requests import BadRequest, Texts, read_mesh
from gspmd.reading import ReadError, read_toml, whole_number
from gspmd.search.answers.document import PRICED
from gspmd.search.writing import mesh_lines
from gspmd.tracing.program_plan import PlannedStep
from gspmd.training import OptimizerConfig
from gspmd.training.reporting.memory import device_bytes
from gspmd.training.step import Update, abstract_program
from gspmd.training.step.building import abstract_gradients
from gspmd.training.toml import ConfigError, from_mapping
from gspmd_models import ModelConfig
from gspmd_models.config import REMATS
from gspmd_models.remat.prediction import kept_bytes
from gspmd_models.step import Language


@dataclass(frozen=True)
class LayoutRequest(Texts):
    """A request about a training step of a model in a layout.

    `lines` has changes of the layout, one `key = spec` per line.

    `own` has all lines of a layout that a search found; these lines replace `layout`. If `remat` is empty, the model's
    own rematerialization is used.
    """

    config: str = ""
    layout: str = ""
    mesh: str = ""
    chip: str = "tpu-v5p"
    batch: str = "256"
    length: str = "2048"
    microbatches: str = "1"
    dtype: str = "bfloat16"
    lowering: str = ""
    remat: str = ""
    lines: str = ""
    own: str = ""

    @classmethod
    def longest(cls, name: str) -> int:
        """Return the largest number of characters that a field may have."""
        return limits.LINES if name in ("lines", "own") else limits.TEXT


class Shelf:
    """The models and layouts that a page may name: those in two folders, and the preset layouts.

    Args:
        configs: the folder of the config files that come with gspmd.
        folder: the folder of the user's layouts, if there is one.
    """

    def __init__(self, configs: Path, folder: Path | None = None):
        self._configs, self._folder = configs, None if folder is None else folder.resolve()

    def configs(self) -> dict[str, dict[str, Any]]:
        """Return, by name, the tables of every config file whose model is the transformer and not a custom model."""
        found = {path.stem: read_toml(path) for path in sorted(self._configs.glob("*.toml"))}
        return {name: tables for name, tables in found.items() if "class" not in tables.get("model", {"class": 0})}

    def layouts(self) -> dict[str, str]:
        """Map the name by which a page asks for a layout to the preset or path from which it is loaded."""
        found = {name: name for name in preset_names()}
        if self._folder is not None:
            files = sorted(self._folder.glob("*.toml"))
            found |= {path.name: str(path) for path in files if self._is_within(path)}
        return found

    def _is_within(self, path: Path) -> bool:
        """Return whether a layout's file, and all files on which it is based, are in the folder; links are followed."""
        assert self._folder is not None
        for _ in range(limits.BASES):
            if not path.resolve().is_relative_to(self._folder):
                return False
            try:
                base = read_toml(path).get("base")
            except ReadError:
                return True  # `Layout.load` reports the fault.
            if not isinstance(base, str) or not is_path(base):
                return True
            path = path.parent / base
        return False

    def model(self, name: str) -> ModelConfig:
        """Return the model of a config file.

        Raises:
            NotationError: no config file has this name.
        """
        return from_mapping(ModelConfig, self._tables(name)["model"], source=f"config {name}")

    def path(self, name: str) -> Path:
        """Return the path of a config file.

        Raises:
            NotationError: no config file has this name.
        """
        self._tables(name)
        return self._configs / f"{name}.toml"

    def _tables(self, name: str) -> dict[str, Any]:
        configs = self.configs()
        if name not in configs:
            raise NotationError(
                f"no config is called {shown(name)}.\n  {suggestion(name, configs)}Choose from the list."
            )
        return configs[name]

    def layout(self, name: str) -> Layout:
        """Load a layout.

        Raises:
            LayoutError: no layout has this name, or it cannot be read.
        """
        known = self.layouts()
        if name not in known:
            raise LayoutError(f"no layout is called {shown(name)}.\n  {suggestion(name, known)}Choose from the list.")
        return Layout.load(known[name])


class LayoutAnswer:
    """The plan of the training step that a request asks for, and everything that the page shows about this plan.

    Raises:
        NotationError, ConfigError: the request names something that does not exist, or that does not fit.
    """

    def __init__(self, request: LayoutRequest, shelf: Shelf):
        self.request, self.chip = request, chip(request.chip)
        self.model = shelf.model(request.config)
        if request.remat:
            if request.remat not in REMATS:
                raise NotationError(f"remat is {shown(request.remat)}.\n  Choose one of {listed(REMATS)}.")
            offload = self.model.offload and request.remat != "none"  # Under none, nothing has a name to move it by.
            self.model = replace(self.model, remat=request.remat, offload=offload)
        self.batch, self.length, self.microbatches = (
            read_count(getattr(request, name), name) for name in ("batch", "length", "microbatches")
        )
        self.own, self.changes = dict(read_lines(request.own)), dict(read_lines(request.lines))
        self.base = self._own_layout() if self.own else shelf.layout(request.layout)
        layout = self.base.override(self.changes)
        self.written = layout.lowered(request.lowering) if request.lowering else layout
        source = self.length if self.model.encoder_layers else 0
        self.subject = Language(self.model, jnp.dtype(request.dtype), source_length=source)
        sizes = self.subject.sizes(self.batch, self.length)
        self.mesh = self.written.complete_mesh(read_mesh(request.mesh))
        self.layout = self.written.resolved(sizes, self.mesh)
        self.subject.check(self.layout, self.mesh, self.batch, self.length, self.microbatches)

    @property
    def _typed(self) -> Any:
        """The mesh, without devices and with Explicit axes, so that specs are part of the types of arrays."""
        axes = self.mesh
        return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Explicit,) * len(axes))

    @contextmanager
    def _planning(self) -> Iterator[None]:
        """Set the mesh, the lowering and the chip for which the step is planned."""
        with (
            jax.sharding.use_abstract_mesh(self._typed),
            lowering(self.layout.lowering or "auto"),
            planned_for(self.chip),
        ):
            yield

    @cached_property
    def _program(self) -> tuple[Any, ...]:
        """The step, its state, and its other arguments, as shapes."""
        update = Update(OptimizerConfig(), 1000, self.microbatches)
        with self._planning():
            return abstract_program(self.subject, update, self.batch, self.length)(self.layout, self._typed)

    @cached_property
    def planned(self) -> gspmd.ProgramPlan:
        """The plan of the step."""
        step, *given = self._program
        with self._planning():
            return gspmd.trace(step, *given)

    @cached_property
    def held(self) -> dict[str, int]:
        """The bytes of the state and of the gradients on one device, by kind."""
        _, state, *_ = self._program
        with self._planning():
            gradients = abstract_gradients(self.subject, self.layout, state.params, self._typed, ())
        held = {"parameters": state.params, "gradients": gradients, "optimizer": state.optimizer}
        return {name: device_bytes(tree) for name, tree in held.items()}

    def kept(self) -> dict[str, Any]:
        """Return the bytes on one device that blocks keep for the backward pass, or the reason why they are not known.

        `all` has the sum of these bytes and of the bytes of the state and the gradients. If the sum is more than the
        memory of the chip, `over` says by how much.
        """
        count, reason = self._kept()
        total, has = sum(self.held.values()) + (count or 0), self.chip.hbm_bytes
        known = {"kept": {"bytes": count} | _said(bytes=count)} if count is not None else {"reason": reason}
        over = amount_of_bytes(total - has) if total > has else ""
        return known | {"all": {"bytes": total} | _said(bytes=total), "over": over, "capacity": has}

    def _kept(self) -> tuple[int | None, str]:
        """Return the bytes that blocks keep, and ""; or None, and the reason why these bytes are not predicted."""
        if self.model.encoder_layers:
            return None, "not predicted for a model with an encoder"
        sizes = self.batch // self.microbatches, self.length
        with planned_for(self.chip):
            count = kept_bytes(self.model, self.layout, self._typed, *sizes, jnp.dtype(self.request.dtype))
        return count, "" if count is not None else "not predicted for stages, nor for one block of each kind"

    def record(self) -> dict[str, Any]:
        """Return everything as data for JSON.

        Each amount is there as a number, and also as text, written as in printed tables.
        """
        plan, held = self.planned, self.held
        totals = {
            "seconds": plan.seconds - plan.hidden_seconds,
            "hidden_seconds": plan.hidden_seconds,
            "wire_bytes": plan.wire_bytes,
            "flops": plan.flops,
            "held_bytes": sum(held.values()),
        }
        return {
            "mesh": mesh_text(self.mesh),
            "slice": slice_of(self.chip, prod(self.mesh.values())),
            "uncompiled": compiler_fault(self.chip),
            "totals": totals | _said(**totals),
            "rows": self._rows(plan.entries),
            "kinds": _kinds(plan.entries),
            "memory": [
                {"what": name, "bytes": count, "said_bytes": amount_of_bytes(count)} for name, count in held.items()
            ],
            "capacity": {"bytes": self.chip.hbm_bytes, "said_bytes": amount_of_bytes(self.chip.hbm_bytes)},
            "lines": [{"key": key, "spec": text, "base": base} for key, text, base in self._lines()],
            "chosen": list(self.layout.chosen),
            "notes": list(plan.notes),
            "figure": inline(self.layout.figure()),
            "toml": self.toml,
            "command": self.command,
        }

    def _rows(self, entries: Iterable[PlannedStep]) -> list[dict[str, Any]]:
        """Add up the steps of each equation; the equation that takes the most seconds comes first."""
        found: defaultdict[str, list[PlannedStep]] = defaultdict(list)
        for entry in entries:
            found[entry.equation].append(entry)
        rows = []
        for equation, steps in found.items():
            seconds = sum(each.step.seconds * each.trips - each.hidden_seconds for each in steps)
            sent, flops = sum(each.wire_bytes for each in steps), sum(each.step.flops * each.trips for each in steps)
            names = dict.fromkeys(each.step.name for each in steps)
            figures = {"seconds": seconds, "wire_bytes": sent, "flops": flops}
            row = {"equation": equation, "lines": self._lines_of(equation), "trips": max(each.trips for each in steps)}
            rows.append(row | {"steps": list(names)} | figures | _said(**figures))
        return sorted(rows, key=lambda row: -row["seconds"])

    @cached_property
    def _sections(self) -> dict[str, dict[str, str]]:
        """Map each section to its specs in canonical text, and each of these specs to the lines that have the spec."""
        found: defaultdict[str, dict[str, str]] = defaultdict(dict)
        for key, text in self.layout.table.items():
            section, _, name = key.partition(".")
            if isinstance(text, str) and not name.endswith("via"):
                spec = str(Spec.parse(text).without_trivial(self.mesh))
                found[section][spec] = f"{found[section][spec]}, {key}" if spec in found[section] else key
        return found

    def _lines_of(self, equation: str) -> list[str]:
        """Return the lines of the layout that an equation reads.

        They are taken from the section that has most of the equation's specs.
        """
        specs = set()
        for word in re.findall(r"[^\s,()+>-][^\s,()+]*", equation):
            with suppress(SpecError):  # The name of an operation, an arrow, or the suffix of a partial sum.
                specs.add(str(Spec.parse(word).without_trivial(self.mesh)))
        matches = {
            name: [keys for spec, keys in lines.items() if spec in specs] for name, lines in self._sections.items()
        }
        best = max(matches.values(), key=len, default=[])
        return best if len(best) > 1 else []

    def _lines(self) -> Iterator[tuple[str, str, str]]:
        """Yield for every line its key, its spec, and its spec before the changes."""
        for layout, prefix in ((self.written, ""), *((self.written, name) for name in self.written.overrides)):
            table = layout.overrides[prefix] if prefix else layout.table
            before = self.base.overrides.get(prefix, {}) if prefix else self.base.table
            for key, text in table.items():
                yield f"{prefix}.{key}" if prefix else key, _text(text), _text(before.get(key, ""))

    def _own_layout(self) -> Layout:
        """Return the layout that consists of the lines of the request, which a search has found.

        Raises:
            BadRequest: a line is not written as a search writes one.
        """
        for key, text in self.own.items():
            if not (_KEY.fullmatch(key) and _SPECS.fullmatch(text)):
                raise BadRequest(f"the line {shown(f'{key} = {text}')} is not one that a search writes.")
        with TemporaryDirectory() as folder:
            path = Path(folder, "found.toml")
            path.write_text(self.document(self.own), encoding="utf-8")
            return replace(Layout.load(path), name="found")

    @property
    def toml(self) -> str:
        """The layout as the text of a file.

        The file has changes to another layout, or all lines of a layout that a search found.
        """
        if self.own:
            return self.document(self.own | self.changes)
        return self.document(self.changes)

    def document(self, lines: Mapping[str, str]) -> str:
        """Return a layout file with these lines.

        If a search found the lines, the file also has the lowering that the search prices.
        """
        lowering = self.request.lowering or (PRICED if self.own else "")
        sections: defaultdict[str, list[str]] = defaultdict(list)
        for key, text in lines.items():
            section, _, name = key.partition(".")
            quoted = f'"{name}"' if "." in name else name
            sections[section].append(f"{quoted} = {_toml(text)}")
        if lowering:
            sections["lowering"].append(f'default = "{lowering}"')
        mesh = read_mesh(self.request.mesh) or {"x": 1}
        about = f"# {self.request.config} on {mesh_text(mesh)}, {self.batch} x {self.length}, {self.chip.name}."
        first = "\n".join(["", "[mesh]", *mesh_lines(mesh)]) if self.own else f'base = "{self.request.layout}"'
        return "\n".join(
            [about, first, *("\n".join(["", f"[{name}]", *inside]) for name, inside in sections.items()), ""]
        )

    @property
    def command(self) -> str:
        """The command that trains the model in this layout; a layout that a search found is read from a file."""
        layout = "layout.toml" if self.own else self.request.layout
        words = ["gspmd", "train", "--config", self.request.config, "--layout", layout]
        words += ["--mesh", mesh_text(self.mesh), "--batch", str(self.batch), "--length", str(self.length)]
        words += ["--microbatches", str(self.microbatches)] if self.microbatches > 1 else []
        words += ["--model.remat", self.request.remat] if self.request.remat else []
        if not self.own:
            words += ["--lowering", self.request.lowering] if self.request.lowering else []
            words += [word for key, text in self.changes.items() for word in ("--set", f"{key}={text}")]
        return shlex.join(words)


_KEY, _SPECS = re.compile(r"[a-z][a-z0-9_.]*"), re.compile(r"[A-Za-z0-9_{},.() ?-]+")
"""Patterns of keys and specs that the file of a found layout may have."""


def slice_of(chip: Chip, devices: int) -> str:
    """Return the name of the TPU slice, or of the GPU nodes, with this number of devices, or "" if there is none.

    >>> from gspmd.hardware.chips import CHIPS
    >>> slice_of(CHIPS["tpu-v5p"], 64), slice_of(CHIPS["h100"], 4), slice_of(CHIPS["tpu-v5p"], 2)
    ('tpu-v5p:4x4x4', 'h100:4', 'tpu-v5p:1x1x2')
    """
    lines = [(*(1,) * (chip.torus - 1), devices)] if not chip.is_switch else [(devices,)]
    for shape in (*shapes(chip), *lines):
        named = Named(chip, shape)
        if prod(shape) * named.cores == devices:
            with suppress(PlanError):
                return read_name(named.name).name
    return ""


def compiler_fault(of: Chip) -> str:
    """Return the reason why programs for a chip cannot be compiled here, or "" if they can."""
    try:
        (require_cuda_plugin if of.is_switch else require_libtpu)(of.name, of)
    except PlanError as error:
        return str(error)
    return ""


def read_lines(text: str) -> Iterator[tuple[str, str]]:
    """Yield the key and the spec of each changed line of a layout; the text has one `ffn.w_in = E_xF_y` per line.

    Raises:
        BadRequest: a line has no key or no equals sign.

    Example:
        >>> list(read_lines("ffn.w_in = E_xF_y\\n\\npadding.H = 64"))
        [('ffn.w_in', 'E_xF_y'), ('padding.H', '64')]
    """
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        if line.strip():
            if not (key.strip() and equals):
                raise BadRequest(
                    f"the line {shown(line.strip())} of a layout is not KEY = SPEC, such as ffn.w_in = E_xF_y."
                )
            yield key.strip(), value.strip()


def read_count(text: str, what: str) -> int:
    """Read a batch, a length, or a number of microbatches.

    Raises:
        NotationError: the text is not a whole number, or the number is too large.
    """
    number = whole_number(text)
    if not number or number > limits.COUNT:
        raise NotationError(f"{what} is {shown(text)}.\n  Write a whole number from 1 to {limits.COUNT:,}.")
    return number


def _text(text: Any) -> str:
    return " | ".join(text) if isinstance(text, tuple) else str(text)


def _toml(text: str) -> str:
    parts = [f'"{part.strip()}"' for part in text.split("|")]
    return parts[0] if len(parts) == 1 else f"[{', '.join(parts)}]"


def _said(**figures: float) -> dict[str, str]:
    how = {"seconds": amount_of_seconds, "bytes": amount_of_bytes, "flops": amount_of_flops}
    return {f"said_{name}": how[name.rpartition("_")[2]](figure) for name, figure in figures.items()}


def _kinds(entries: Iterable[PlannedStep]) -> list[dict[str, Any]]:
    """Add up the steps of each kind over the same mesh axes; the sum with the most seconds comes first."""
    found: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0, 0])
    for entry in entries:
        row = found[entry.step.name]
        row[0] += entry.step.seconds * entry.trips
        row[1] += entry.wire_bytes
        row[2] += entry.trips
    rows = sorted(found.items(), key=lambda each: -each[1][0])
    return [
        {"name": name, "count": count, "seconds": seconds, "wire_bytes": sent} | _said(seconds=seconds, wire_bytes=sent)
        for name, (seconds, sent, count) in rows
    ]


def planned(
    request: LayoutRequest, shelf: Shelf, part: Callable[[LayoutAnswer], dict[str, Any]] = LayoutAnswer.record
) -> dict[str, Any]:
    """Return a part of the answer to a request.

    A ConfigError is raised as a NotationError, so that the page shows the message.
    """
    try:
        return part(LayoutAnswer(request, shelf))
    except ConfigError as error:
        raise NotationError(str(error)) from None
