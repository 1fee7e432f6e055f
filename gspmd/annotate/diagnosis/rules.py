"""The rules of a whole equation, for texts whose specs may also have faults.

A product has two operands, and one of these may be a group. A sum has no groups, and every term of a sum has all the
dimensions of the result. If it is known which equations to write instead, the remedy names these equations.
`is_well_formed` of `annotate/equation.py` checks the same rules without explaining faults.
"""

from gspmd.annotate.diagnosis.nodes import Dim, LocatedOperand, LocatedSpec, LocatedTerm
from gspmd.annotate.errors import Fault
from gspmd.annotate.parser import dim_text


def form_faults(
    text: str, terms: list[LocatedTerm], outputs: list[LocatedTerm] | None, *, is_via: bool = False
) -> list[Fault]:
    """Return every fault in the form of an equation; `outputs` is None for a via, which has no right side."""
    faults = [fault for term in terms for fault in _product_faults(text, term, terms, outputs, is_via)]
    if len(terms) > 1 and any(o.group for term in terms for o in term):
        faults.append(_group_in_sum(text, terms, outputs))
    if outputs is None:
        return faults
    if len(outputs) > 1 or len(outputs[0]) > 1:
        return [*faults, _several_outputs(text, outputs)]
    output = outputs[0][0]
    unpaired = [] if faults else _group_faults(text, terms, output)
    return [*faults, *(unpaired or _output_faults(text, terms, output))]


# -- products ---------------------------------------------------------------------------------------------------------


def _product_faults(
    text: str, term: LocatedTerm, terms: list[LocatedTerm], outputs: list | None, is_via: bool
) -> list[Fault]:
    faults = []
    empty = next((n for n, o in enumerate(term) if o.start == o.end), None)
    if len(term) > 2 and empty is not None:
        faults.append(_lone_comma(text, term, empty, f"so that the product has {len(term)} operands"))
    elif len(term) > 2:
        fact = f"a product has two operands, but this product has {len(term)}."
        one_each = "Write one spec for each of the two operands."
        remedy = one_each if is_via else _split_product(text, term, terms, outputs)
        faults.append(_at(text, term[2], fact, remedy, term[-1].end))
    groups = [o for o in term if o.group and not o.broken]
    if len(groups) > 1:
        fact = "a product has at most one group, and this is a second."
        faults.append(_at(text, groups[1], fact, "Write an equation for each pair."))
    if groups and len(term) == len(terms) == 1 and outputs is not None:
        fact = "a move is of one array, but a group is several arrays."
        faults.append(_at(text, groups[0], fact, "Write an equation for each array."))
    return faults


def _split_product(text: str, term: LocatedTerm, terms: list[LocatedTerm], outputs: list | None) -> str:
    if outputs is None or len(terms) > 1 or any(o.group or o.broken for o in [*term, *outputs[0]]):
        return "Write products of two operands, one equation after the other."
    return "Write one equation after the other: " + " and ".join(f"'{e}'" for e in _chain(text, term, outputs[0])) + "."


def _chain(text: str, term: LocatedTerm, results: LocatedTerm) -> list[str]:
    """Write a product of many operands as products of two operands.

    Intermediate results keep only the dimensions that are still needed.
    """
    left, left_text, equations = term[0].specs[0].dims, _slice(text, term[0]), []
    for at, operand in enumerate(term[1:-1], 1):
        wanted = {name for later in [*term[at + 1 :], *results] for name in later.specs[0].names}
        left = _product_of(left, operand.specs[0].dims, wanted)
        result = "".join(dim_text(d.name, [a.name for a in d.axes]) for d in left)
        equations.append(f"{left_text}, {_slice(text, operand)} -> {result}")
        left_text = result
    return [*equations, f"{left_text}, {_slice(text, term[-1])} -> {_slice(text, results[0])}"]


def _product_of(one: list[Dim], two: list[Dim], wanted: set[str]) -> list[Dim]:
    """Return the dimensions of a product that are in `wanted`.

    A dimension of the product is sharded as in the first operand that has it. If an earlier dimension of the product
    already uses one of these mesh axes, the dimension is unsharded.
    """
    dims: dict[str, Dim] = {}
    used: set[str] = set()
    for dim in [*one, *two]:
        if dim.name in wanted and dim.name not in dims:
            free = used.isdisjoint(a.name for a in dim.axes)
            dims[dim.name] = Dim(dim.name, dim.start, dim.end, dim.axes if free else [])
            used |= {a.name for a in dims[dim.name].axes}
    return list(dims.values())


def _lone_comma(text: str, operands: LocatedTerm, empty: int, so: str) -> Fault:
    """Return the fault of a comma beside an empty operand.

    This is the comma before the operand, or the comma after the operand if it is the first.
    """
    behind, end = text[: operands[empty].start].rstrip(), operands[empty].end
    at = len(behind) - 1 if empty else len(text) - len(text[end:].lstrip())
    return Fault(text, at, at + 1, f"an operand is missing next to this comma, {so}.", "Drop the comma.")


# -- groups -----------------------------------------------------------------------------------------------------------


def _group_in_sum(text: str, terms: list[LocatedTerm], outputs: list | None) -> Fault:
    group = next(o for term in terms for o in term if o.group)
    fact = "a group cannot be in a sum of products."
    return _at(text, group, fact, _split_sum(text, terms, outputs))


def _split_sum(text: str, terms: list[LocatedTerm], outputs: list | None) -> str:
    results = outputs[0][0].specs if outputs else []
    lengths = {len(o.specs) for term in terms for o in term if o.group}
    if lengths != {len(results)} or len(results) < 2:
        return "Write the group as an equation of its own, and the sum as another."
    left = [" + ".join(", ".join(_member(text, o, i) for o in term) for term in terms) for i in range(len(results))]
    sums = [f"'{one} -> {_slice(text, result)}'" for one, result in zip(left, results)]
    return f"Write one sum for each result: {' and '.join(sums)}."


def _group_faults(text: str, terms: list[LocatedTerm], output: LocatedOperand) -> list[Fault]:
    group = next((o for term in terms for o in term if o.group), None)
    if output.broken or (group.broken if group else not output.group):
        return []
    if group is None:
        fact = "the result is a group, but no operand is a group."
        return [_at(text, output, fact, "Write one spec, or a group in one operand.")]
    count = len(group.specs)
    if not output.group:
        fact = f"an operand is a group of {count}, but the result is one spec."
        each = ", ".join([_slice(text, output)] * count)
        return [_at(text, output, fact, f"Write a result for each: '({each})'.")]
    if count != len(output.specs):
        fact = f"the result is a group of {len(output.specs)}, but the operand is a group of {count}."
        return [_at(text, output, fact, "Write one result for each member of the operand.")]
    return []


# -- results ----------------------------------------------------------------------------------------------------------


def _several_outputs(text: str, outputs: list[LocatedTerm]) -> Fault:
    first, last = outputs[0][0], outputs[-1][-1]
    if len(outputs) > 1:
        fact = "a sum appears to the right of the arrow."
        return _at(text, first, fact, "Write the products to its left, and one result.", last.end)
    empty = next((n for n, o in enumerate(outputs[0]) if o.start == o.end), None)
    if empty is not None:
        return _lone_comma(text, outputs[0], empty, "and an equation has one result")
    specs = ", ".join(_slice(text, s) for o in outputs[0] for s in o.specs)
    remedy = f"The results of a group are written in parentheses: '({specs})'."
    return _at(text, first, "an equation has one result.", remedy, last.end)


def _output_faults(text: str, terms: list[LocatedTerm], output: LocatedOperand) -> list[Fault]:
    return [
        fault
        for at, spec in enumerate(output.specs)
        if not spec.broken
        for fault in _missing_dims(text, spec, [_dims_of(term, at) for term in terms])
    ]


def _dims_of(term: LocatedTerm, at: int) -> list[str] | None:
    """Return the dimensions of a term's operands, or None if some of them could not be read.

    If an operand is a group, its spec number `at` is used, or its first spec if it has no such spec.
    """
    specs = [o.specs[at if o.group and at < len(o.specs) else 0] for o in term]
    return None if any(s.broken for s in specs) else list(dict.fromkeys(n for s in specs for n in s.names))


def _missing_dims(text: str, spec: LocatedSpec, known: list[list[str] | None]) -> list[Fault]:
    return [fault for dim in spec.dims if (fault := _missing_dim(text, dim, known))]


def _missing_dim(text: str, dim: Dim, known: list[list[str] | None]) -> Fault | None:
    missing = [n for n, dims in enumerate(known) if dims is not None and dim.name not in dims]
    if not missing:
        return None
    if len(missing) == len(known):
        have = list(dict.fromkeys(name for dims in known if dims for name in dims))
        fact, whose = f"dimension {dim.name} is in the result but in no operand.", "The operands have"
    else:
        have = known[missing[0]]
        fact, whose = f"dimension {dim.name} is in the result but not in term {missing[0] + 1}.", "That term has"
    return Fault(text, dim.start, dim.end, fact, f"{whose} {', '.join(have) if have else 'no dimension'}.")


def _at(text: str, operand: LocatedOperand, fact: str, remedy: str, end: int | None = None) -> Fault:
    return Fault(text, operand.start, operand.end if end is None else end, fact, remedy)


def _member(text: str, operand: LocatedOperand, at: int) -> str:
    return _slice(text, operand.specs[at] if operand.group and at < len(operand.specs) else operand)


def _slice(text: str, part: LocatedSpec | LocatedOperand) -> str:
    return text[part.start : part.end].strip()
