"""An interpreter of compiled programs that executes the instructions, in scheduled order, on a simulated device."""

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import NamedTuple

from gspmd.audit.hlo.collectives import Collective, collective
from gspmd.audit.hlo.loops import cut_out, reordered, trips
from gspmd.audit.hlo.module import Computation, Instruction, Module
from gspmd.audit.hlo.origin import origin
from gspmd.audit.hlo.replica_groups import touched_by
from gspmd.audit.simulation.copies import started_copy, touches_host
from gspmd.audit.simulation.launches import launched
from gspmd.audit.simulation.links import MEMORY, Torus, Transfer, transfer
from gspmd.audit.simulation.machine import HOST_MEMORY, Machine, Span
from gspmd.audit.simulation.roofline import cost
from gspmd.hardware.chips import Chip
from gspmd.hardware.matmul import timed_kernels

Value = int | dict | None
"""The simulated value of an instruction. It is the number of the transfer for which the users of the instruction's
result have to wait, or None if there is no such transfer. The value of a tuple may instead be a dict from the index of
each element to the value of this element."""


_OVERFLOW_NOTE = (
    "the compiler's estimates of some instructions overflowed; their seconds are computed from the sizes of their "
    "products, or from their bytes"
)


class CopiedInLoop(NamedTuple):
    """A copy of all or a part of an array, which every iteration of a loop makes although none changes the array.

    Attributes:
        instruction: the instruction that copies.
        times: number of copies in the whole program.
        seconds: time of all these copies.
    """

    instruction: Instruction
    times: int
    seconds: float


class Interpreter:
    """One simulated run of a program on one device; the docstring of `gspmd.audit.timeline` describes the model."""

    def __init__(self, module: Module, chip: Chip, mesh: Mapping[str, int], torus: Torus):
        self.module, self.chip, self.mesh, self.torus = module, chip, mesh, torus
        self.devices = prod(mesh.values())
        self.machine = Machine()
        self.notes: list[str] = []
        self.copied_in_loops: dict[str, CopiedInLoop] = {}
        self.cut_in_loops: dict[str, CopiedInLoop] = {}
        self._launched: dict[str, frozenset[str]] = {}
        self._trips = 1  # the product of the trip counts of all loops around the current instruction

    def run(self, computation: Computation, arguments: list[Value]) -> Value:
        """Execute the instructions of a computation, and return the value of its root instruction."""
        known: dict[str, Value] = {}
        for instruction in computation.instructions:
            known[instruction.name] = self._execute(computation, instruction, known, arguments)
        return known[computation.root.name]

    def _execute(self, computation: Computation, instruction: Instruction, known: dict, arguments: list) -> Value:
        opcode, operands = instruction.opcode, [known.get(name) for name in instruction.operands]
        if opcode == "parameter":
            number = int(instruction.arguments)
            return arguments[number] if number < len(arguments) else None
        if opcode == "tuple":
            return dict(enumerate(operands))
        if opcode == "get-tuple-element":
            number = int(instruction.attribute("index"))
            return operands[0].get(number) if isinstance(operands[0], dict) else operands[0]
        if opcode.endswith("-done"):
            self.machine.wait(_number(operands[0]))
            return None
        if opcode == "while":
            return self._loop(computation, instruction, operands[0])
        if opcode == "conditional":
            return self._conditional(instruction, operands[1:])
        if opcode == "call":
            return self.run(self.module.computations[instruction.called[0]], operands)
        return self._work(computation, instruction, operands)

    def _work(self, computation: Computation, instruction: Instruction, operands: list[Value]) -> Value:
        """Simulate an instruction, and return its value.

        For an instruction that starts a transfer, the value is the number of the transfer, for which the corresponding
        `-done` instruction waits.
        """
        sent = collective(self.module, computation, instruction, self.devices)
        if sent and sent.phase == "done":
            self.machine.wait(_number(operands[0]))
            return None
        if sent:
            number = self._send(computation, instruction, sent)
            if sent.phase == "start":
                return number
            self.machine.wait(number)
            return None
        if instruction.opcode.endswith("-start"):
            return self._copy(computation, instruction)
        self._compute(computation, instruction)
        return next((value for value in operands if value is not None), None)

    def _compute(self, computation: Computation, instruction: Instruction) -> None:
        if instruction.is_kernel and not instruction.kernel_work:
            self.notes.append(
                f"the time of kernel {instruction.name} is not known; its arrays are read and written once"
            )
        elif instruction.is_kernel and instruction.name not in self.module.kernels:
            self.notes.append(f"kernel {instruction.name} has no schedule; its seconds are a lower bound")
        elif instruction.cycles_overflowed:
            self.notes.append(_OVERFLOW_NOTE)
        took = cost(self.module, computation, instruction, self.chip)
        if took.bytes and touches_host(computation, instruction):
            self.notes.append(
                f"{instruction.name} reads or writes host memory itself, which the simulation does not price; its "
                "seconds are a lower bound"
            )
        if instruction.name in self._launches(computation):
            self.machine.launch(self.chip.launch_seconds)
        if took.seconds or took.flops:
            span = self._span(computation, instruction, "einsum" if took.flops else "other", ("compute",), took.bytes)
            self.machine.compute(replace(span, seconds=took.seconds), took.flops, took.memory_bound, took.memory_share)

    def _send(self, computation: Computation, instruction: Instruction, sent: Collective) -> int | None:
        rows = touched_by(sent.instruction, self.mesh)
        if sent.group == 1 or not rows:
            return None
        span = self._span(computation, instruction, sent.kind, rows, sent.wire_bytes, sent)
        self.machine.launch(self.chip.launch_seconds)
        return self.machine.start(span, transfer(sent, self.mesh, self.chip, self.torus))

    def _launches(self, computation: Computation) -> frozenset[str]:
        """Return the names of the GPU kernels that begin a launch by the host; the result is empty on a TPU."""
        if not self.chip.launch_seconds:
            return frozenset()
        if computation.name not in self._launched:
            every = (
                (each, collective(self.module, computation, each, self.devices)) for each in computation.instructions
            )
            communicating = frozenset(each.name for each, sent in every if sent)
            self._launched[computation.name] = launched(computation, communicating, self.chip)
        return self._launched[computation.name]

    def _copy(self, computation: Computation, instruction: Instruction) -> int:
        """Start a copy or a slice between memories, and return the number of the transfer.

        The transfer runs at the bandwidth of main memory, on a chip whose kernels have been timed at the bandwidth that
        they reach, or at the bandwidth of the link to the host if one end is host memory.
        """
        copy = started_copy(self.module, computation, instruction)
        if not copy.direction:
            span = self._span(computation, instruction, "copy", ("memory",), copy.bytes)
            timed = timed_kernels(self.chip)
            busy = timed.memory_seconds(copy.moved, self.chip) if timed else copy.bytes / self.chip.hbm_bandwidth
            return self.machine.start(span, Transfer(busy, 0.0, frozenset({MEMORY})))
        if not self.chip.host_bandwidth:
            self.notes.append(
                f"the bandwidth between {self.chip.name} and its host is not known; copies between them run at the "
                "bandwidth of main memory in this simulation, so their seconds are a lower bound"
            )
        span = self._span(computation, instruction, "copy", (HOST_MEMORY,), copy.bytes)
        busy = copy.bytes / (self.chip.host_bandwidth or self.chip.hbm_bandwidth)
        return self.machine.start(span, Transfer(busy, 0.0, frozenset({copy.direction})))

    def _loop(self, computation: Computation, loop: Instruction, carried: Value) -> Value:
        """Simulate a loop, and return the value that the loop carries at its end.

        Iterations are simulated until the transfers in flight are the same after an iteration as before it. This
        iteration then also stands for all remaining iterations that the host can launch in the same way
        (`Machine.alike`).

        On a GPU, the condition is skipped if the host knows the number of iterations. If the host does not know the
        number, it waits for the condition in every iteration.
        """
        runs = trips(self.module, computation, loop)
        if runs is None:
            runs = 1
            self.notes.append(f"the trips of loop {loop.name} depend on computed values; it is counted once")
        body, condition = (self.module.computations[loop.attribute(n).lstrip("%")] for n in ("body", "condition"))
        outside, self._trips = self._trips, self._trips * runs
        for found, copies in ((reordered, self.copied_in_loops), (cut_out, self.cut_in_loops)):
            for each in found(self.module, body) if runs > 1 else ():
                seconds = self._trips * cost(self.module, body, each, self.chip).seconds
                copies[each.name] = CopiedInLoop(each, self._trips, seconds)
        left, waits = runs, self.chip.launch_seconds > 0 and trips(self.module, computation, loop) is None
        while left:
            sums, recorded, before = self.machine.sums.copy(), len(self.machine.spans), self.machine.transfer_state()
            ahead, least = self.machine.ahead, self.machine.least
            self.machine.least = ahead
            begun, left = self.machine.now, left - 1
            if waits or not self.chip.launch_seconds:
                self.run(condition, [carried])
            if waits:
                self.machine.synchronize()
            carried = self.run(body, [carried])
            alike = self.machine.transfer_state() == before
            more = self.machine.alike(ahead, sums["launch"], left) if alike else 0
            self.machine.repeat(sums, recorded, ahead, more)
            self.machine.least = min(least, self.machine.least)
            if seconds := self.machine.now - begun:
                span = self._span(computation, loop, "loop", ("compute",))
                self.machine.record(replace(span, start=begun, seconds=seconds, times=more + 1, trips=more + 1))
            left -= more
        self._trips = outside
        return carried

    def _conditional(self, conditional: Instruction, arguments: list[Value]) -> Value:
        """Simulate every branch from the same state, and continue from the state after the slowest branch.

        On a GPU, the host first waits for the value that selects the branch.
        """
        if self.chip.launch_seconds:
            self.machine.synchronize()
        before = self.machine
        taken: tuple[Machine, Value] | None = None
        for name, argument in zip(conditional.called, arguments):
            self.machine = before.copy()
            value = self.run(self.module.computations[name], [argument])
            if taken is None or self.machine.elapsed > taken[0].elapsed:
                taken = self.machine, value
        assert taken is not None  # A conditional has branches.
        self.machine, value = taken
        return value

    def _span(
        self,
        computation: Computation,
        scheduled: Instruction,
        category: str,
        rows: tuple[str, ...],
        moved: int = 0,
        sent: Collective | None = None,
    ) -> Span:
        """Return the bar of an instruction; the start and the seconds of the bar are set later."""
        came = origin(self.module, computation, scheduled, sent.instruction if sent else scheduled)
        return Span(
            _name(scheduled, came.step, category),
            rows,
            0.0,
            0.0,
            category,
            equation=came.equation,
            source=came.source,
            instruction=scheduled.name,
            cycles=scheduled.cycles,
            bytes=moved,
        )


def _name(instruction: Instruction, step: str, category: str) -> str:
    """Return the name of an instruction's bar.

    The name is the planned step, or an operation for this step. If the instruction belongs to no step, the name is the
    category of a collective, the name of a loop, the name in JAX, or the opcode.
    """
    if step and (category not in ("other", "copy") or ".einsum" in step):
        return step
    if step:
        return f"{instruction.opcode} for {step}"
    if category not in ("einsum", "other", "copy"):
        return instruction.name if category == "loop" else category
    named = instruction.op_name.rpartition("/")[2] if instruction.opcode in ("fusion", "custom-call") else ""
    return named or instruction.opcode


def _number(value: Value) -> int | None:
    return value if isinstance(value, int) else None
