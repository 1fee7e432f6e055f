"""The lines of a layout with unknown specs, and the choices: sets of unknowns that are chosen together.

An unknown is a placeholder for the mesh axes that shard one dimension of one line.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

import numpy as np

from gspmd.annotate import LayoutError, PlanError, Spec, parse_via
from gspmd.annotate.equation import Via
from gspmd.annotate.errors import listed, suggestion
from gspmd.layouts import Layout
from gspmd.layouts.naming import via_of
from gspmd.layouts.rules import own
from gspmd.layouts.rules.keys import ALIKE, KEYS, in_dims, is_override, keys_of_override
from gspmd.planner.graph.placements import fitting, sequences
from gspmd.planner.unknown import PREFIX, Known, placed, unknowns_in

MOST_OPTIONS = 200_000
"""The largest number of options that a choice may have in a search."""

_FOLLOWS = (
    ("embedding.tokens", "attention.residual", "BL"),
    ("attention.norm", "attention.residual", "E"),
    ("ffn.norm", "ffn.residual", "E"),
    ("output.norm", "ffn.residual", "E"),
    ("attention.relative", "attention.query", "H"),
    ("attention.sinks", "attention.query", "H"),
    ("attention.latent_query", "attention.query", "BL"),
    ("attention.w_k_down", "attention.w_q_down", "E"),
)
"""Lines that are tied to another line in some dimensions, since a different sharding costs a move and gains nothing."""


@dataclass
class Lines:
    """The lines of a layout, with each dimension sharded over an unknown.

    Attributes:
        layout: the layout with these lines; only the dimensions of its specs are used.
        dims: the dimensions of each line that is not a via.
        whole: for each line, the dimensions that must not be sharded.
        vias: the lines of vias, each with the dimensions of both operands.
        fixed: lines with a given spec or via, which is their only option.
        trained: lines of parameters, whose gradient and optimizer state have separate lines.
        around: mesh axes, with their sizes, that the search does not assign to lines, such as the axis along which the
            stages of a pipeline lie.
        beside: those axes of `around` along which identical pipelines run side by side. Every batch is sharded over
            these axes first, and then over its unknown.
    """

    layout: Layout
    dims: dict[str, str]
    whole: dict[str, set[str]]
    vias: dict[str, tuple[str, str]]
    fixed: Mapping[str, str] = field(default_factory=dict)
    trained: list[str] = field(default_factory=list)
    around: Mapping[str, int] = field(default_factory=dict)
    beside: tuple[str, ...] = ()
    _numbers: dict[tuple[str, str], int] = field(default_factory=dict)
    _parent: dict[str, str] = field(default_factory=dict)
    _held: set[str] = field(default_factory=set)  # Unknowns that are fixed to no mesh axis.
    _unread: set[str] = field(default_factory=set)  # Vias that the program was given but does not use.
    _absent: set[str] = field(default_factory=set)  # Lines without a tensor in the program, tied to other lines.

    @classmethod
    def of(cls, layout: Layout, fixed: Mapping[str, str]) -> Lines:
        """Return the lines of a layout in all sections that describe the model, including its custom sections.

        Args:
            layout: a layout of the model.
            fixed: lines that are not searched, with their specs.
        """
        known = KEYS | own.keys(layout.own)
        written = {name: known[name] for name in layout.table if name in known}
        lines = {name: key for name, key in written.items() if key.kind != "via" and key.section != "pipeline"}
        for key in KEYS.values():  # Keys that default to another line have a separate line in the search.
            if key.default in lines and key.kind != "via" and len(key.dims) > 1 and "scale" not in key.name:
                lines.setdefault(key.name, key)
        vias = [key for key in KEYS.values() if key.kind == "via" and key.dims[0] in lines and key.dims[1] in lines]
        made = cls(
            layout,
            {name: "".join(key.dims) for name, key in lines.items()},
            {name: {*key.local} for name, key in lines.items()},
            {key.name: ("".join(known[key.dims[0]].dims), "".join(known[key.dims[1]].dims)) for key in vias},
            dict(fixed),
        )
        parameters = {**keys_of_override("optimizer"), **layout.own}  # `keep` later drops custom activations.
        made.trained = [name for name, dims in made.dims.items() if name in parameters and len(dims) > 1]
        for key in written.values():
            if key.kind == "via" and key.name not in KEYS:
                made.vias[key.name] = (key.dims[0], key.dims[1])
        made._whole_by_default()
        # The vias of weights in custom sections, and the lines of optimizer and cache, are known once the program is
        # read.
        made.check_fixed(name for name in fixed if name in KEYS or not (name.endswith("_via") or is_override(name)))
        for first, second, dims in (*ALIKE, *_FOLLOWS):
            if first in made.dims and second in made.dims:
                for dim in dims:
                    made.tie(made.unknown(first, dim), made.unknown(second, dim))
        if {"attention.in_via", "attention.key_via"} <= made.vias.keys():
            for dim in made.vias["attention.in_via"][0]:  # Queries, keys and values have one operand.
                made.tie(made.unknown("attention.in_via", dim), made.unknown("attention.key_via", dim))
        return made

    def check_fixed(self, names: Iterable[str] | None = None) -> None:
        """Raise an error if a fixed line does not exist.

        Raises:
            LayoutError: a line does not exist. The message names the first such line.
        """
        for name in self.fixed if names is None else names:
            if self._has(name):
                continue
            if name.startswith("gradients."):
                raise LayoutError(
                    f"cannot fix {name}: the search itself chooses when each gradient is reduced.\n"
                    f"  Give {name.removeprefix('gradients.')} instead, or its optimizer state, optimizer.{name[10:]}."
                )
            every = [*(line for line in self.dims if line in self.layout.table or names is None), *self.vias]
            raise LayoutError(
                f"cannot fix {name}: the layout has no such line, or the program does not read it.\n"
                f"  {suggestion(name, every)}Its lines are {', '.join(every)}."
            )

    def _has(self, name: str) -> bool:
        """Return whether there is a line with this name that can be fixed to a spec or via."""
        section, _, rest = name.partition(".")
        return name in self.dims or name in self.vias or (section == "optimizer" and rest in self.trained)

    def specs_of(self, line: str) -> tuple[Spec, ...]:
        """Return the spec of a line that can be fixed, with its unknowns; for a via, the specs of both operands."""
        if line in self.vias:
            return tuple(self.via(line).specs)
        return (self.spec(line, self.dims[line if line in self.dims else line.removeprefix("optimizer.")]),)

    def check_on(self, mesh: Mapping[str, int]) -> None:
        """Raise an error if a fixed line is not possible on this mesh, or is not possible on any mesh.

        Args:
            mesh: sizes of all mesh axes, including axes of size 1.

        Raises:
            LayoutError: a fixed line is not possible. The message names the fault.
        """
        self.check_fixed()
        for line, text in self.fixed.items():
            given = parse_via(text).specs if line in self.vias else (Spec.parse(text),)
            own = self.specs_of(line)
            wanted = "".join(dim for spec in own for dim in spec.dims)
            if "".join(dim for spec in given for dim in spec.dims) != wanted:
                raise LayoutError(f"cannot fix {line} = '{text}': its dimensions must be {wanted}.")
            if missing := sorted(set().union(*(spec.used for spec in given)) - {*mesh}):
                raise LayoutError(
                    f"cannot fix {line} = '{text}': the mesh has no axis {', '.join(missing)}.\n"
                    f"  Its axes are {', '.join(mesh)}."
                )
            for spec, unknown in zip(given, own):
                for dim in spec.dims:
                    if not unknown.axes_of(dim) and any(mesh[axis] > 1 for axis in spec.axes_of(dim)):
                        raise LayoutError(
                            f"cannot fix {line} = '{text}': the program, or a rule of all layouts, does not allow "
                            f"{dim} to be sharded there.\n  Leave {dim} unsharded."
                        )
            if any(spec.partial or spec.reduced for spec in given):
                raise LayoutError(f"cannot fix {line} = '{text}': a fixed line cannot have a partial sum or reduced-.")

    def copy(self) -> Lines:
        """Return a copy of the lines with the same ties, for tracing a different program."""
        return replace(
            self, dims={**self.dims}, vias={**self.vias}, trained=[*self.trained], _numbers={**self._numbers},
            _parent={**self._parent}, _held={*self._held}, _unread={*self._unread}, _absent={*self._absent},
        )  # fmt: skip

    def served(self) -> Lines:
        """Return the lines for a program that trains nothing and caches keys and values.

        The rows of all caches lie on the same devices, so that all rows of a text can be copied together.
        """
        lines = self.copy()
        lines.trained = []
        cached = {f"cache.{name}": key for name, key in keys_of_override("cache").items()}
        for name, key in cached.items():
            lines.dims[name], lines.whole[name] = "".join(key.dims), {*key.local}
            lines.tie(lines.unknown(name, "B"), lines.unknown(next(iter(cached)), "B"))
        return lines

    def tie_as(self, other: Lines) -> None:
        """Add the ties of `other`, a copy of these lines with which a similar program was traced."""
        self.vias |= other.vias
        self._numbers |= other._numbers
        self._parent |= other._parent
        self._held |= other._held
        self._unread |= other._unread

    def _whole_by_default(self) -> None:
        for name, dims in (("attention.key", "L"), ("attention.w_q", "D"), ("attention.w_o", "D"),
                           ("attention.in_via", "D"), ("attention.out_via", "D"),
                           ("attention.relative", "R"), ("attention.w_q_down", "U"), ("attention.w_q_up", "D"),
                           ("attention.w_k_down", "Z"), ("attention.w_k_up", "ZD"),
                           ("attention.w_v_up", "ZD")):  # fmt: skip
            # D is whole, as there are enough query heads to split; L of keys, as keys that go round a ring are another
            # program; R, as a device needs the whole table of relative positions; U and Z, as latents are whole.
            self.whole.setdefault(name, set()).update(dims)

    def add_vias(self, products: Iterable[tuple[Spec, Sequence[Spec]]]) -> None:
        """Add the vias of the products whose weights have lines.

        A via is the two specs in which an operand and a weight are multiplied. The weights that multiply one operand
        together form a group and share one via. Examples are the weights of a gated layer, and the weights of queries,
        keys and values. Separate vias would multiply the number of options, and would not be cheaper, apart from
        rounding.

        Args:
            products: the products of the program, each as the spec of an operand and the specs of the weights that
                multiply it.
        """
        of = {Spec(spec.dims, spec.axes): name for name, dims in self.dims.items() for spec in [self.spec(name, dims)]}
        groups: list[list[tuple[str, tuple[str, str]]]] = []
        for left, weights in products:
            names = [of.get(Spec(each.dims, each.axes)) for each in weights]
            if any(name is None for name in names):  # For example an adapter's weight, which has no line.
                continue
            vias = [via_of(name) for name in names if name is not None]
            if {*vias} & self._unread or any(name in KEYS and via not in KEYS for name, via in zip(names, vias)):
                continue  # no layout has such a line
            groups.append([(via, ("".join(left.dims), "".join(each.dims))) for via, each in zip(vias, weights)])
        clashing = _clashing(groups, self.vias)
        for group in groups:
            if clashing & {via for via, _ in group}:
                continue
            first, (left_dims, _) = group[0]
            for via, dims in group:
                self.vias.setdefault(via, dims)
                for dim in left_dims:
                    self.tie(self.unknown(first, dim), self.unknown(via, dim))
                alike = next(other for other, (_, right) in group if right == dims[1])
                for dim in dims[1]:
                    self.tie(self.unknown(alike, dim), self.unknown(via, dim))

    # -- unknowns ------------------------------------------------------------------------------------------------------

    def unknown(self, line: str, dim: str) -> str:
        """Return the name of the unknown over which a dimension of a line is sharded."""
        # A number is shorter than the line's name, and it is in the types of everything that is traced.
        return self._root(f"{PREFIX}{self._numbers.setdefault((line, dim), len(self._numbers))}")

    def _root(self, name: str) -> str:
        while name in self._parent:
            name = self._parent[name]
        return name

    def described(self, unknown: str) -> str:
        """Describe an unknown for a message by the dimension and the line that it shards."""
        of = [f"{dim} of {line}" for line, dim in [*self._numbers] if self.unknown(line, dim) == self._root(unknown)]
        return of[0] if of else unknown

    def tie(self, one: str, other: str) -> None:
        """Make two unknowns one, so that both stand for the same mesh axes."""
        one, other = self._root(one), self._root(other)
        if one != other:
            self._parent[one] = other
            if one in self._held:
                self._held.add(other)

    def hold(self, name: str) -> None:
        """Fix an unknown to the empty list of mesh axes, so that its dimensions stay unsharded."""
        self._held.add(self._root(name))

    def spec(self, line: str, dims: str, whole: Iterable[str] = ()) -> Spec:
        """Return the spec of a line with these dimensions, with an unknown for each dimension that may be sharded.

        The dimensions in `whole` are not sharded.
        """
        kept = {*whole, *self.whole.get(line, ())}
        axes = []
        for dim in dims:
            own = self.unknown(line, dim) if dim not in kept else None
            first = self.beside if dim == "B" else ()
            axes.append(first if own is None or own in self._held else (*first, own))
        return Spec(tuple(dims), tuple(axes))

    def via(self, line: str) -> Via:
        """Return a via: the specs of both operands of a product, with an unknown for each dimension."""
        left, right = self.vias[line]
        return Via.of(self.spec(line, left), self.spec(line, right))

    def keep(self, unknowns: Set[str], owed: Collection[str]) -> None:
        """Drop the lines of tensors that the program does not have: all unknowns of such a line are absent.

        If only some unknowns of a line are absent, the line is tied to the line of another tensor. If the line
        overrides a line, or has a default, it is dropped too, and the line that it overrides or its default applies.
        Otherwise it stays, so that the layout shards both tensors alike. Its dimensions with an absent unknown are
        unsharded. Lines for which `_is_as_default` is true are also dropped.

        Args:
            unknowns: the unknowns that occur in the program.
            owed: the unknowns over which the program has partial sums. A parameter is not trained if the program has
                neither a partial sum of its gradient nor a state for it.
        """
        state = {name: unknowns_in(self.spec(f"optimizer.{name}", self.dims[name])) for name in self.trained}
        self.trained = [name for name, own in state.items() if self.owed(name) in owed or not unknowns.isdisjoint(own)]
        for line, pairs in self.tensors().items():
            if pairs and not any(name in unknowns for _, name in pairs):
                self.dims.pop(line, None)
                if self.vias.pop(line, None):
                    self._unread.add(line)
        own = {line: unknowns_in(self.spec(line, dims)) for line, dims in self.dims.items()}
        absent = {line for line, names in own.items() if not unknowns >= {*names}}
        follows = {line for line in absent if is_override(line) or (line in KEYS and KEYS[line].default is not None)}
        follows |= {line for line in self.dims if self._is_as_default(line)}
        self._absent = absent - follows
        for line in follows:  # Without it, the line that it overrides or follows applies.
            del self.dims[line]

    def _is_as_default(self, line: str) -> bool:
        """Return whether a line missing from the layout is tied, in all dimensions, to the line that is its default.

        Such a line adds no choice, and most models have no tensor for it. For example, few models have latents of
        attention. A trained parameter keeps its line, since its gradient and optimizer state have choices.
        """
        default = KEYS[line].default if line in KEYS else None
        written = line in self.layout.table or line in self.fixed or line in self.trained
        if default is None or default not in self.dims or written:
            return False
        return self.spec(line, self.dims[line]) == in_dims(self.spec(default, self.dims[default]), self.dims[line])

    def may_owe(self, line: str) -> bool:
        """Return whether the gradient of a parameter may stay a partial sum until the end of the step."""
        return self.owed(line) not in self._held

    def owed(self, line: str) -> str:
        """Return the unknown for the mesh axes over which a parameter's gradient stays a partial sum in a step."""
        return self.unknown(f"gradients.{line}", "sum")

    @staticmethod
    def _pairs(spec: Spec) -> tuple[tuple[str, str], ...]:
        return tuple((dim, name) for dim, axes in zip(spec.dims, spec.axes) for name in axes if name.startswith(PREFIX))

    # -- the layout ----------------------------------------------------------------------------------------------------

    def table(self) -> dict[str, str]:
        """Return the specs and vias of all lines, including overriding ones, with their unknowns.

        They are in the form that `Layout.override` accepts.
        """
        found = {name: str(self.spec(name, dims)) for name, dims in self.dims.items()}
        found |= {name: str(self.via(name)) for name in self.vias}
        for name in self.trained:
            own, dims = self.spec(name, self.dims[name]), self.dims[name]
            found[f"optimizer.{name}"] = str(self.spec(f"optimizer.{name}", dims))
            found[f"gradients.{name}"] = str(own.with_partial((self.owed(name),) if self.may_owe(name) else ()))
        return found

    def tensors(self) -> dict[str, tuple[tuple[str, str], ...]]:
        """Return, for each line, the unknowns that must not share a mesh axis, each with its dimension.

        The unknown of a gradient's partial sum has no dimension, because it stands for mesh axes that do not shard the
        weight.
        """
        present = {name: dims for name, dims in self.dims.items() if name not in self._absent}
        found = {name: self._pairs(self.spec(name, dims)) for name, dims in present.items()}
        for name in self.vias:
            found[name] = tuple(dict(pair for each in self.via(name).specs for pair in self._pairs(each)).items())
        for name in self.trained:
            if self.may_owe(name):
                found[name] = (*found[name], ("", self.owed(name)))
            found[f"optimizer.{name}"] = self._pairs(self.spec(f"optimizer.{name}", self.dims[name]))
        return found

    def mesh(self) -> dict[str, int]:
        """Return the mesh on which a program is traced.

        It has one axis of size 1 for each unknown, and the axes of `around`.
        """
        named = [name for pairs in self.tensors().values() for _, name in pairs] or [PREFIX]
        return {**dict.fromkeys(named, 1), **self.around}

    def unknowns_of(self, key: str) -> tuple[str, ...]:
        """Return the unknowns of a line; the line is named as in `written`."""
        section, _, rest = key.partition(".")
        if section == "gradients":
            return (self.owed(rest),)
        if key in self._absent:
            return ()
        if key in self.vias:
            return unknowns_in(tuple(self.via(key).specs))
        return unknowns_in(self.spec(key, self.dims[rest if section == "optimizer" else key]))

    def lines_of(self, unknowns: Collection[str]) -> list[str]:
        """Return the lines that have one of these unknowns, including gradients; they are named as in `written`."""
        of_state = [f"{each}.{name}" for name in self.trained for each in ("gradients", "optimizer")]
        keys = [*self.dims, *self.vias, *of_state]
        return [key for key in keys if {*self.unknowns_of(key)} & {*unknowns}]

    def written(self, known: Known, *, settled: bool = False) -> dict[str, str]:
        """Return every line with the mesh axes of `known` in place of its unknowns; see `writer`."""
        return self.writer(settled=settled)(known)

    def writer(
        self, *, settled: bool = False, only: Collection[str] | None = None
    ) -> Callable[[Known], dict[str, str]]:
        """Return a function that writes the lines, given the mesh axes of unknowns.

        The lines are in the form that `Layout.override` accepts. A gradient or an optimizer state that is sharded like
        its parameter is not written. A line with an unknown whose mesh axes are not given is not written either.

        Args:
            only: write only these lines; the line of a gradient is written with its parameter.
            settled: whether to write also gradients that are sharded like their parameter. This is needed with several
                microbatches, because a gradient without a line then stays a partial sum.
        """
        specs: dict[str, tuple[Spec, ...]] = {name: (self.spec(name, dims),) for name, dims in self.dims.items()}
        specs |= {name: tuple(self.via(name).specs) for name in self.vias}
        plain = [name for name in specs if only is None or name in only]
        later = [(name, f"gradients.{name}", self.owed(name), f"optimizer.{name}") for name in self.trained]
        specs |= {state: (self.spec(state, self.dims[name]),) for name, _, _, state in later}
        needed = {key: unknowns_in(each) for key, each in specs.items()}
        texts: dict[tuple, str] = {}  # A line has few placements, each of which is in many options.

        def text(key: str, known: Known) -> str | None:
            at = key, *(known.get(name) for name in needed[key])
            if None in at and key not in self._absent:
                return None
            if at not in texts:
                each = specs[key]
                if key in self._absent:
                    each = (Spec(each[0].dims, tuple(tuple(a for a in axes if a in known) for axes in each[0].axes)),)
                texts[at] = ", ".join(str(placed(spec, known)) for spec in each)
            return texts[at]

        def write(known: Known) -> dict[str, str]:
            found = {key: each for key in plain if (each := text(key, known)) is not None}
            for name, gradient, unknown, state in later:
                owed = known.get(unknown, ())
                if (settled or owed) and name in found:
                    found[gradient] = str(Spec.parse(found[name]).with_partial(owed))
                own = text(state, known) if only is None or state in only else None
                if own is not None and own != found.get(name):
                    found[state] = own
            return found

        return write


def _clashing(
    groups: Iterable[Sequence[tuple[str, tuple[str, str]]]], written: Mapping[str, tuple[str, str]]
) -> set[str]:
    """Return the vias that cannot be written, because products with different dimensions would share them.

    For example, a tied autoencoder multiplies by one weight in both directions, and weights called `k` and `w_k` would
    share one `k_via`. For such products the planner chooses the via. The weights of a group share one via: if it cannot
    be written for one of these weights, it is written for none of them.
    """
    wanted: dict[str, set[tuple[str, str]]] = {via: {dims} for via, dims in written.items() if via not in KEYS}
    every = [*groups]
    for group in every:
        for via, dims in group:
            wanted.setdefault(via, set()).add(dims)
    found = {via for via, dims in wanted.items() if len(dims) > 1 and via not in KEYS}
    while more := {via for group in every for via, _ in group if found & {each for each, _ in group}} - found:
        found |= more
    return found


@dataclass(frozen=True)
class LineChoice:
    """A choice of a search: unknowns that are chosen together, with every way to replace them by mesh axes.

    Attributes:
        name: the name of the choice, which is the name of its first line.
        unknowns: the unknowns, one for each column of `rows`.
        rows: [option, unknown], the mesh axes of each unknown under each option, as an index in
            `gspmd.planner.graph.placements.sequences`.
    """

    name: str
    unknowns: tuple[str, ...]
    rows: np.ndarray

    def column(self, unknown: str) -> np.ndarray:
        """Return the mesh axes of an unknown for each option, as indices of sequences of mesh axes."""
        return self.rows[:, self.unknowns.index(unknown)]


def choices_of(
    lines: Lines,
    sizes: Mapping[str, Collection[int]],
    mesh: Mapping[str, int],
    dimensions: Mapping[str, int] = {},
) -> list[LineChoice]:
    """Return every choice of a search on one mesh; unknowns that lines connect, even indirectly, are chosen together.

    Args:
        lines: the lines of the layout.
        sizes: for each unknown, the sizes of the dimensions sharded over it, all of which its mesh axes must divide. An
            unknown that is missing here may have any mesh axes.
        mesh: sizes of the mesh axes, all above 1.
        dimensions: sizes by which the finished layout is checked. The mesh axes of lines must divide these sizes too,
            even if the tensors of the program are larger, such as those of two shared experts together.

    Raises:
        PlanError: a choice has too many options.
    """
    tensors, counts = lines.tensors(), tuple(mesh.values())
    groups: list[tuple[set[str], list[str]]] = []
    for line, pairs in tensors.items():
        names = {name for _, name in pairs}
        if not names:
            continue
        near = [group for group in groups if group[0] & names]
        for group in near:
            groups.remove(group)
            names |= group[0]
        groups.append((names, [*(each for group in near for each in group[1]), line]))
    needed = {name: {*each} for name, each in sizes.items()}
    for line, pairs in tensors.items():
        for dim, name in pairs if line not in lines.vias else ():
            if dim in dimensions:
                needed.setdefault(name, set()).add(dimensions[dim])
    owed = {lines.owed(name) for name in lines.trained}
    every = frozenset(range(1 << len(counts)))
    found = []
    following = {first for first, _, _ in _FOLLOWS}
    # Pipelines side by side split the batch only, except for arrays that are updated after the pipelines.
    taken = sum(1 << axis for axis, name in enumerate(mesh) if name in lines.beside)
    free = {name for key in lines.trained for name in unknowns_in(lines.spec(f"optimizer.{key}", lines.dims[key]))}
    beside = frozenset(mask for mask in every if not mask & taken)
    for names, members in [part for _, tied in groups for part in _parts(tied, tensors, lines)]:
        unknowns = tuple(dict.fromkeys(name for line in members for _, name in tensors[line] if name in names))
        fits = {
            name: (every if name in free else beside).intersection(*(fitting(n, counts) for n in needed.get(name, ())))
            for name in unknowns
        }
        apart = [frozenset(name for _, name in tensors[line]) for line in members]
        rows = _placements(unknowns, fits, apart, owed, len(counts), members)
        given: list[str] = []
        for line in members:
            if line in lines.fixed and names.issuperset(unknowns_in(lines.specs_of(line))):
                rows = _as_given(lines, line, unknowns, rows, mesh, given)
                given.append(line)
        name = next((line for line in members if line not in following), members[0])
        is_place = any(not names.issuperset(name for _, name in tensors[line]) for line in members)
        found.append(LineChoice(f"{name}: place" if is_place else name, unknowns, rows))
    return found


def _parts(
    members: list[str], tensors: Mapping[str, tuple[tuple[str, str], ...]], lines: Lines
) -> Iterator[tuple[set[str], list[str]]]:
    """Split connected lines into choices: yield the unknowns that are chosen together, with their lines.

    Several vias, with the lines tied to them, may have only the placement of one tensor in common. Then each via with
    its tied lines becomes a separate choice, and so does the placement of this tensor. A single choice for all of them
    would have many times as many options. In training they stay a single choice, because the parts of the tensor's
    gradient are added.
    """
    own = {line: {name for _, name in tensors[line]} for line in members}
    common = set.intersection(*own.values())
    parts: list[tuple[set[str], list[str]]] = []
    for line in members:
        # Lines that are tied in all dimensions, such as those of both weights of a gate, are one choice.
        near = [part for part in parts if part[0] & own[line] - common or part[0] == own[line]]
        parts = [part for part in parts if part not in near]
        lines_of_part = [*(each for _, several in near for each in several), line]
        parts.append((own[line].union(*(names for names, _ in near)), lines_of_part))
    if len(parts) > 1 and common and lines.vias.keys() & {*members} and not lines.trained:
        yield common, members
        yield from parts
    else:
        yield set().union(*own.values()), members


def _as_given(
    lines: Lines,
    line: str,
    unknowns: Sequence[str],
    rows: np.ndarray,
    mesh: Mapping[str, int],
    before: Sequence[str],
) -> np.ndarray:
    """Return the options in which a line has its given spec; mesh axes of size 1 shard nothing.

    Args:
        lines, line, mesh: the lines of the layout, the given line, and the sizes of the mesh axes.
        unknowns, rows: the options, as in `LineChoice`.
        before: fixed lines to which the options have already been restricted.

    Raises:
        LayoutError: no option is left.
    """
    order, axes = sequences(len(mesh)).number, list(mesh)
    given = parse_via(lines.fixed[line]).specs if line in lines.vias else (Spec.parse(lines.fixed[line]),)
    fits = np.ones(len(rows), bool)
    for spec, unknown in zip(given, lines.specs_of(line)):
        for dim, names in zip(unknown.dims, unknown.axes):
            wanted = tuple(axes.index(axis) for axis in spec.axes_of(dim) if axis in axes)
            column = rows[:, unknowns.index(names[-1])] if names else np.zeros(len(rows), int)
            fits &= column == order[wanted]
    if not fits.any():
        others = listed(f"{each} = '{lines.fixed[each]}'" for each in before)
        beside = f" with {others}, given as well" if before else ""
        raise LayoutError(
            f"cannot fix {line} = '{lines.fixed[line]}': on this mesh the program cannot use this spec{beside}.\n"
            "  Give another spec, or leave the line out, so that it is searched."
        )
    return rows[fits]


def _placements(
    unknowns: Sequence[str],
    fits: Mapping[str, frozenset[int]],
    apart: Sequence[frozenset[str]],
    sets: Collection[str],
    count: int,
    lines: Sequence[str],
) -> np.ndarray:
    """Return an array, indexed by [option, unknown], of all placements in which no tensor has a mesh axis twice."""
    masks, order = sequences(count).mask, sequences(count).axes
    table, taken = np.zeros((1, 0), int), np.zeros((1, len(apart)), int)
    for name in unknowns:
        allowed = np.flatnonzero(np.isin(masks, [*fits[name]]))
        if name in sets:  # Sets of mesh axes have no order.
            allowed = np.array([number for number in allowed.tolist() if [*order[number]] == sorted(order[number])])
        within = [number for number, names in enumerate(apart) if name in names]
        free = np.ones((len(table), len(allowed)), bool)
        for number in within:
            free &= taken[:, number, None] & masks[allowed] == 0
        row, picked = np.nonzero(free)
        if len(row) > MOST_OPTIONS:
            raise PlanError(
                f"cannot search {', '.join(lines)} together: there are more than {MOST_OPTIONS} ways to shard them.\n"
                "  Give some of these lines a spec (fixed=, or --fixed), or search a mesh with fewer axes."
            )
        sequence = allowed[picked]
        table, taken = np.hstack([table[row], sequence[:, None]]), taken[row].copy()
        for number in within:
            taken[:, number] |= masks[sequence]
    return table


def unknown_layout(lines: Lines) -> Layout:
    """Return the layout with an unknown in every line; its mesh axes are the unknowns."""
    plain = replace(lines.layout, overrides={}, lowerings={}, padding={}, choices=())
    axes = tuple(lines.mesh())
    return replace(plain.override(lines.table()), axes=axes, factor=axes)
