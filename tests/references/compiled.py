"""Count the collectives and dot FLOPs of a compiled program in its HLO text, times the trips of its loops."""

import re
from collections import Counter
from math import prod

from gspmd.hardware.links import wire_bytes

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")
_COLLECTIVE = re.compile(rf"= (?P<type>\(.*?\)|\S+) (?P<kind>{'|'.join(KINDS)})(-start)?\(")
_ARRAY = re.compile(r"[a-z]+(?P<bits>\d+)\[(?P<shape>[\d,]*)\]")
_DOT = re.compile(
    r"^\s*(?:ROOT )?%\S+ = \S+?\[(?P<out>[\d,]*)\]\S* "
    r"dot\(%?(?P<left>[\w.\-]+),.*lhs_contracting_dims=\{(?P<dims>[\d,]*)\}"
)
_SHAPE = re.compile(r"^\s*(?:ROOT )?%(?P<name>[\w.\-]+) = \S+?\[(?P<shape>[\d,]*)\]")
_CALLS = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


def collectives(text: str) -> Counter:
    """Return how often every kind of collective runs."""
    return Counter({kind: sum(n for k, n, _ in _found(text) if k == kind) for kind in {k for k, *_ in _found(text)}})


def bytes_sent(text: str) -> int:
    """Bytes that one device sends."""
    return sum(sent for *_, sent in _found(text))


def dot_flops(text: str) -> int:
    """Floating-point operations of all matrix products of one device."""
    total = 0
    for lines, trips in _computations(text):
        shapes = {m["name"]: _numbers(m["shape"]) for m in map(_SHAPE.match, lines) if m}
        for dot in filter(None, map(_DOT.match, lines)):
            contracted = prod(shapes[dot["left"]][d] for d in _numbers(dot["dims"]))
            total += 2 * prod(_numbers(dot["out"])) * contracted * trips
    return total


def _found(text: str) -> list[tuple[str, int, int]]:
    """Kind, number of executions, and bytes of every collective; several arrays in one count one by one."""
    found = []
    for lines, trips in _computations(text):
        for line in lines:
            if match := _COLLECTIVE.search(line):
                arrays = [prod(_numbers(a["shape"])) * int(a["bits"]) // 8 for a in _ARRAY.finditer(match["type"])]
                kind, group = match["kind"], group_size(line)
                if kind == "all-to-all":  # a tuple of the parts that one array is cut into
                    arrays = [sum(arrays)]
                grown = group if kind == "reduce-scatter" else 1
                sent = sum(wire_bytes(kind, group, size * grown) for size in arrays)
                found.append((kind, len(arrays) * trips, sent * trips))
    return found


def _computations(text: str) -> list[tuple[list[str], int]]:
    """The lines of every computation, and how often it runs."""
    bodies, name, entry = {}, "", ""
    for line in text.splitlines():
        if opened := _COMPUTATION.match(line):
            name = opened["name"]
            bodies[name] = []
            entry = name if line.startswith("ENTRY") else entry
        elif name:
            bodies[name].append(line)
    trips = Counter({entry: 1})
    _count(entry, 1, bodies, trips)
    return [(lines, trips[name]) for name, lines in bodies.items() if trips[name]]


def _count(name: str, times: int, bodies: dict, trips: Counter) -> None:
    for line in bodies[name]:
        loop = _TRIPS.search(line)
        for called in _CALLS.findall(line):
            if called in bodies:
                runs = times * (int(loop[1]) if loop else 1)
                trips[called] += runs
                _count(called, runs, bodies, trips)


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]


def group_size(line: str) -> int:
    """Return the number of devices in a collective's groups; 2 for a permute, which has pairs."""
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    counted = re.search(r"replica_groups=\[\d+,(\d+)\]", line)
    if listed:
        return listed[1].count(",") + 1
    named = re.search(r"replica_groups=mesh\[(?P<mesh>[^\]]*)\] \{(?P<axes>[^}]*)\}", line)
    if counted:
        return int(counted[1])
    if named:
        sizes = dict(re.findall(r"('\w+')=(\d+)", named["mesh"]))
        return prod(int(sizes[axis]) for axis in named["axes"].replace(" ", "").split(","))
    assert "source_target_pairs" in line, line  # a permute has pairs, and sends its whole buffer
    return 2
