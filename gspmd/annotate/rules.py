"""The rules of a whole equation, over what was written, whether or not each spec in it is free of faults.

A product has two operands, of which one may be a group; a sum has no groups; an output dimension stands in every term.
"""

from gspmd.annotate.errors import Fault
from gspmd.annotate.reader import Written


def faults_of(text: str, terms: list, outputs: list | None) -> list[Fault]:
    """Every fault of an equation's form; `outputs=None` where only a left side was written."""
    faults = [f for term in terms for f in _product_faults(text, term, terms, outputs)]
    if len(terms) > 1 and any(o.group for term in terms for o in term):
        faults.append(_group_in_sum(text, terms, outputs))
    if outputs is None:
        return faults
    one = len(outputs) == 1 and len(outputs[0]) == 1
    if not one:
        return [*faults, _several_outputs(text, outputs)]
    output = outputs[0][0]
    shape = [] if faults else _group_faults(text, terms, output)
    return [*faults, *shape, *([] if shape else _output_faults(text, terms, output))]


# -- products ---------------------------------------------------------------------------------------------------------


def _product_faults(text: str, term: list, terms: list, outputs: list | None) -> list[Fault]:
    faults = []
    if len(term) > 2:
        fact = f"a product has two operands, and this has {len(term)}."
        remedy = _split_product(text, term, outputs) if len(terms) == 1 else "Write a product of its own for each two of them."
        faults.append(Fault(text, term[2].start, term[-1].end, fact, remedy))
    groups = [o for o in term if o.group]
    if len(groups) > 1:
        fact = "a product has one group at most, and this is a second."
        faults.append(Fault(text, groups[1].start, groups[1].end, fact, "Write an equation for each pair."))
    if len(term) == 1 and len(terms) == 1 and groups:
        fact = "a move takes one array, and a group is several."
        faults.append(Fault(text, groups[0].start, groups[0].end, fact, "Write an equation for each."))
    return faults


def _split_product(text: str, term: list, outputs: list | None) -> str:
    if outputs is None or any(o.group for o in term) or any(s.broken for o in term for s in o.specs):
        return "Write two equations, each with two operands."
    last = text[outputs[0][0].start : outputs[-1][-1].end]
    wanted = [s.names for o in term for s in o.specs] + [[n for t in outputs for o in t for s in o.specs for n in s.names]]
    left, left_text, lines = term[0].specs[0], _text(text, term[0]), []
    for at, operand in enumerate(term[1:], 1):
        if at == len(term) - 1:
            lines.append(f"'{left_text}, {_text(text, operand)} -> {last}'")
            break
        later = {n for names in wanted[at + 1 :] for n in names}
        left, result = _product_of(left, operand.specs[0], later)
        lines.append(f"'{left_text}, {_text(text, operand)} -> {result}'")
        left_text = result
    return "Write one equation after the other: " + " and ".join(lines) + "."


def _product_of(one: Written, two: Written, wanted: set[str]) -> tuple[Written, str]:
    """The spec of an intermediate product: each dimension placed as where it first stands, if the axis is still free."""
    dims = {d.name: d for d in [*two.dims, *one.dims] if d.name in wanted}
    dims = [dims[n] for n in dict.fromkeys([*one.names, *two.names]) if n in dims]
    used: set[str] = set()
    pieces = []
    for dim in dims:
        names = [a.name for a in dim.axes]
        free = names if not used & set(names) else []
        used |= set(free)
        braces = any(len(n) > 1 for n in free)
        pieces.append(dim.name + ("_" + ("{" + ",".join(free) + "}" if braces else "".join(free)) if free else ""))
    return Written(one.start, one.end, dims), "".join(pieces)


# -- groups -----------------------------------------------------------------------------------------------------------


def _group_in_sum(text: str, terms: list, outputs: list | None) -> Fault:
    group = next(o for term in terms for o in term if o.group)
    fact = "a group cannot stand in a sum of products."
    return Fault(text, group.start, group.end, fact, _split_sum(text, terms, outputs))


def _split_sum(text: str, terms: list, outputs: list | None) -> str:
    results = outputs[0][0].specs if outputs and len(outputs) == 1 and len(outputs[0]) == 1 else []
    lengths = {len(o.specs) for term in terms for o in term if o.group}
    if lengths == {len(results)} and len(results) > 1 and all(len(t) <= 2 for t in terms):
        lines = [" + ".join(", ".join(_text(text, o, i) for o in t) for t in terms) + f" -> {_slice(text, r)}"
                 for i, r in enumerate(results)]
        return "Write one sum for each result: " + " and ".join(f"'{line}'" for line in lines) + "."
    return "Write the group as an equation of its own, and the sum as another."


def _group_faults(text: str, terms: list, output) -> list[Fault]:
    group = next((o for term in terms for o in term if o.group), None)
    if group is None and output.group:
        fact = "the result is a group, and no operand is."
        return [Fault(text, output.start, output.end, fact, "Write one spec, or a group in one operand.")]
    if group is not None and not output.group:
        count = len(group.specs)
        fact = f"an operand is a group of {count}, and the result is one spec."
        specs = ", ".join([_slice(text, output.specs[0])] * count)
        return [Fault(text, output.start, output.end, fact, f"Write a result for each: '({specs})'.")]
    if group is not None and len(group.specs) != len(output.specs):
        fact = f"the result is a group of {len(output.specs)}, and the operand is a group of {len(group.specs)}."
        return [Fault(text, output.start, output.end, fact, "Write one result for each member of the operand.")]
    return []


# -- outputs ----------------------------------------------------------------------------------------------------------


def _several_outputs(text: str, outputs: list) -> Fault:
    start, end = outputs[0][0].start, outputs[-1][-1].end
    if len(outputs) > 1:
        return Fault(text, start, end, "a sum stands to the right of the arrow.", "Write the products to its left, and one result.")
    specs = ", ".join(_slice(text, s) for o in outputs[0] for s in o.specs)
    return Fault(text, start, end, "an equation has one result.", f"Several results, of a group, stand in parentheses: '({specs})'.")


def _output_faults(text: str, terms: list, output) -> list[Fault]:
    faults = []
    for at, spec in enumerate(output.specs):
        for number, term in enumerate(terms, 1):
            faults += _missing_dims(text, spec, _dims_of(term, at), f"term {number}" if len(terms) > 1 else "")
    return faults


def _dims_of(term: list, at: int) -> list[str] | None:
    """The dimensions from which result `at` is made; None where they could not be read."""
    specs = [o.specs[at] if o.group and at < len(o.specs) else o.specs[0] for o in term]
    return None if any(s.broken for s in specs) else [n for s in specs for n in s.names]


def _missing_dims(text: str, spec: Written, known: list[str] | None, where: str) -> list[Fault]:
    if known is None or spec.broken:
        return []
    has = f"{where} has" if where else "the operands have"
    remedy = f"Here {has} {', '.join(dict.fromkeys(known))}." if known else f"Here {has} no dimension."
    fact = f"stands in the result and in no operand{f' of {where}' if where else ''}."
    return [Fault(text, d.start, d.end, f"dimension {d.name} {fact}", remedy) for d in spec.dims if d.name not in known]


def _text(text: str, operand, at: int | None = None) -> str:
    if at is not None and operand.group and at < len(operand.specs):
        return _slice(text, operand.specs[at])
    return text[operand.start : operand.end].strip()


def _slice(text: str, spec: Written) -> str:
    return text[spec.start : spec.end].strip()
