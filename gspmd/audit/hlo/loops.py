"""While loops: their trip counts, and the copies of arrays that every iteration makes."""

import operator
import re

from gspmd.audit.hlo.module import Computation, Instruction, Module

_ANNOTATED = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_HOLDS = {"LT": operator.lt, "GT": operator.gt, "LE": operator.le, "GE": operator.ge, "NE": operator.ne}
_REORDERS = ("copy", "transpose", "bitcast", "reshape", "parameter")
_SAME = ("copy", "bitcast", "convert", "copy-done", "copy-start", "reshape", "broadcast")


def trips(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Return the number of times that a loop's body runs in one execution of the loop.

    XLA:CPU and XLA:GPU annotate this number (`known_trip_count`). The TPU compiler does not annotate it. In its
    programs, the condition compares a counter with a bound, and the counter is an element of the loop's tuple. The
    counter's initial value is read from this tuple, and the counter's step is read from the body.

    Args:
        module: the program.
        computation: the computation that contains the loop.
        loop: the `while` instruction.

    Returns:
        The trip count, or None if it depends on computed values.
    """
    noted = _ANNOTATED.search(loop.attributes)
    return int(noted[1]) if noted else _counted(module, computation, loop)


def reordered(module: Module, body: Computation) -> list[Instruction]:
    """Return the instructions in a loop's body that copy a whole array that no iteration changes.

    One copy before the loop would be enough. XLA copies the array in every iteration if the body needs a part of the
    array in a different memory order. A scan over layers, for example, may copy the weights of all layers once per
    layer.

    Args:
        module: the program.
        body: the computation that is the body of a `while`.
    """
    whole = _whole(body)
    alone = (each for each in body.instructions if len(each.operands) == 1 and each.operands[0] in whole)
    return [each for each in alone if _reorders(module, each)]


LEAST = 2**12
"""Size in bytes of the smallest slice that `cut_out` regards as the weights of a layer."""


def cut_out(module: Module, body: Computation) -> list[Instruction]:
    """Return the instructions in a loop's body that copy a part of an array that no iteration changes.

    Only copies in main memory are returned. In a loop over layers, such a part is the weights of one layer, copied out
    of the stacked weights of all layers. Most products read the weights directly from the stacked array. But a kernel,
    such as the kernel of `jax.lax.ragged_dot`, needs the weights of its layer as a separate array.

    Slices of fewer bytes than `LEAST` are not weights, and are not returned. An example of such a small slice is the
    position of a row, which is read by a loop that writes the rows of a cache.

    Args:
        module: the program.
        body: the computation that is the body of a `while`.
    """
    whole = _whole(body)
    large = (each for each in body.instructions if sum(array.bytes for array in each.arrays) >= LEAST)
    return [each for each in large if _cut_from(module, each) in whole]


def _whole(body: Computation) -> set[str]:
    """Return the names of the instructions in a loop's body whose values are arrays that no iteration changes."""
    kept, found = _unchanged(body) if body.parameters else frozenset(), set[str]()
    for each in body.instructions:
        source = each.operands[0] if each.operands else ""
        if each.opcode == "get-tuple-element" and kept:
            if source == body.parameters[0].name and int(each.attribute("index")) in kept:
                found.add(each.name)
        elif source in found and each.opcode in ("bitcast", "reshape"):
            found.add(each.name)
    return found


def _unchanged(body: Computation) -> frozenset[int]:
    """Return the positions, in the loop's tuple, of the elements that every iteration passes on unchanged."""
    taken = {
        each.name: int(each.attribute("index"))
        for each in body.instructions
        if each.opcode == "get-tuple-element" and each.operands[0] == body.parameters[0].name
    }
    if body.root.opcode != "tuple":
        return frozenset()
    return frozenset(place for place, name in enumerate(body.root.operands) if taken.get(name) == place)


def _reorders(module: Module, instruction: Instruction) -> bool:
    """Return whether an instruction copies its operand into a different memory order, within main memory.

    The answer is False for a copy to on-chip memory, because such a copy is a prefetch.
    """
    if re.search(r"S\(\d+\)", instruction.type):
        return False
    if instruction.opcode == "fusion":
        fused = module.computations[instruction.called[0]].instructions
        return any(each.opcode in ("copy", "transpose") for each in fused) and all(
            each.opcode in _REORDERS for each in fused
        )
    return instruction.opcode in ("copy", "transpose")


def _cut_from(module: Module, instruction: Instruction) -> str:
    """Return the name of the operand from which an instruction copies a part, within main memory.

    The result is an empty string if the instruction is not such a copy.
    """
    if re.search(r"S\(\d+\)", instruction.type):  # The result is loaded onto the chip.
        return ""
    if instruction.opcode == "dynamic-slice":
        return instruction.operands[0]
    if instruction.opcode != "fusion":
        return ""
    fused = module.computations[instruction.called[0]]
    made = {each.name: each for each in fused.instructions}
    # Single numbers say where the slice begins.
    work = [each for each in fused.instructions if each.opcode != "parameter"]
    arrays = [each for each in work if each.arrays and each.arrays[0].size > 1]
    slices = [each for each in arrays if each.opcode == "dynamic-slice"]
    if len(slices) != 1 or any(each.opcode not in _REORDERS for each in arrays if each not in slices):
        return ""
    read = made[slices[0].operands[0]]
    while read.opcode in ("bitcast", "reshape"):
        read = made[read.operands[0]]
    places = {each.name: number for number, each in fused.parameters.items()}
    return instruction.operands[places[read.name]] if read.name in places else ""


def _counted(module: Module, computation: Computation, loop: Instruction) -> int | None:
    condition = module.computations[loop.attribute("condition").lstrip("%")]
    body = module.computations[loop.attribute("body").lstrip("%")]
    comparison = _comparison(module, condition)
    if comparison is None:
        return None
    direction, sides = comparison
    places = [_place(condition, side) for side in sides]
    steps = [None if place is None else _step(module, body, place) for place in places]
    if sum(bool(step) for step in steps) != 1:
        return None
    counter = 0 if steps[0] else 1
    place, step, other = places[counter], steps[counter], places[1 - counter]
    assert place is not None  # the counter has a single, known step
    assert step is not None
    start = _value_in(module, computation, loop, place)
    bound = _constant(condition, sides[1 - counter])
    if bound is None and other is not None:
        bound = _value_in(module, computation, loop, other)
    if start is None or bound is None:
        return None
    if counter == 1:
        direction = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}.get(direction, direction)
    return _count(direction, start, bound, step)


def _count(direction: str, start: int, bound: int, step: int) -> int | None:
    """Return the number of steps until a comparison of a counter with a bound is false.

    The result is None if the counter would overflow first, because the counter moves away from the bound or, for `NE`,
    steps over the bound. The result is also None for the direction `EQ`.

    Args:
        direction: the operator of the comparison `counter operator bound`, as HLO names it, such as `LT`.
        start: the first value of the counter.
        bound: the value with which the counter is compared.
        step: the amount added to the counter in each step.
    """
    if direction not in _HOLDS:
        return None
    if not _HOLDS[direction](start, bound):
        return 0
    distance = bound - start
    if direction in ("LE", "GE"):
        distance += 1 if direction == "LE" else -1
    if distance * step < 0 or (direction == "NE" and distance % step):
        return None
    return -(-distance // step)


def _comparison(module: Module, condition: Computation) -> tuple[str, tuple[str, str]] | None:
    """Return the direction and the two operands of the comparison that a loop's condition computes.

    The direction is HLO's, such as `LT`. An operand is the name of an instruction in the condition, or a constant as
    the text `=value`. The result is None if the condition is not a single comparison.
    """
    root = _through(condition, condition.root)
    if root.opcode == "compare":
        return root.attribute("direction"), (root.operands[0], root.operands[1])
    if root.opcode != "fusion":
        return None
    inner = module.computations[root.called[0]]
    compare = _through(inner, inner.root)
    if compare.opcode != "compare":
        return None
    sides = (_through(inner, inner.by_name[name]) for name in compare.operands[:2])
    left, right = (
        root.operands[int(side.arguments)] if side.opcode == "parameter" else _literal(side) for side in sides
    )
    return None if left is None or right is None else (compare.attribute("direction"), (left, right))


def _through(computation: Computation, instruction: Instruction) -> Instruction:
    """Return the instruction that computes a value, by going back through instructions that only pass the value on."""
    while instruction.opcode in _SAME and instruction.operands:
        instruction = computation.by_name[instruction.operands[0]]
    return instruction


def _literal(instruction: Instruction) -> str | None:
    """Return a constant as the text `=value`, or None if the instruction is not an integer constant.

    Such a text cannot be the name of an instruction.
    """
    number = _number(instruction)
    return None if number is None else f"={number}"


def _number(instruction: Instruction) -> int | None:
    if instruction.opcode != "constant":
        return None
    try:
        return int(instruction.arguments)
    except ValueError:
        return None


def _constant(computation: Computation, name: str) -> int | None:
    if name.startswith("="):
        return int(name[1:])
    return _number(_through(computation, computation.by_name[name]))


def _place(computation: Computation, name: str) -> int | None:
    """Return the position of a value in the loop's tuple, or None if the value is not an element of the tuple."""
    if name.startswith("="):
        return None
    source = _through(computation, computation.by_name[name])
    if source.opcode != "get-tuple-element" or computation.by_name[source.operands[0]].opcode != "parameter":
        return None
    return int(source.attribute("index"))


def _step(module: Module, body: Computation, place: int) -> int | None:
    """Return the amount that each iteration adds to an element of the loop's tuple, or None if it is unknown."""
    root = _through(body, body.root)
    if root.opcode != "tuple":
        return None
    return _change(module, body, body.by_name[root.operands[place]], lambda name: _place(body, name) == place)


def _change(module: Module, computation: Computation, value: Instruction, is_counter) -> int | None:
    value = _through(computation, value)
    if is_counter(value.name):
        return 0
    if value.opcode == "fusion":
        inner = module.computations[value.called[0]]
        numbered = {each.name: number for number, each in inner.parameters.items()}
        known = lambda name: name in numbered and is_counter(value.operands[numbered[name]])  # noqa: E731
        return _change(module, inner, inner.root, known)
    if value.opcode not in ("add", "subtract"):
        return None
    left, right = (_through(computation, computation.by_name[name]) for name in value.operands)
    if value.opcode == "add" and _number(left) is not None:
        left, right = right, left
    before, added = _change(module, computation, left, is_counter), _number(right)
    if before is None or added is None:
        return None
    return before + (added if value.opcode == "add" else -added)


def _value_in(module: Module, computation: Computation, loop: Instruction, place: int) -> int | None:
    """Return the initial value of an element of the loop's tuple, or None if the value is not a known constant.

    If outer loops pass the value on unchanged, the value is read before the outermost of these loops.
    """
    entering = _through(computation, computation.by_name[loop.operands[0]])
    if entering.opcode != "tuple":
        return None
    value = _through(computation, computation.by_name[entering.operands[place]])
    outer = _place(computation, value.name)
    callers = module.callers.get(computation.name, [])
    if outer is None or len(callers) != 1 or callers[0][1].opcode != "while":
        return _number(value)
    return _value_in(module, *callers[0], outer) if _step(module, computation, outer) == 0 else None
