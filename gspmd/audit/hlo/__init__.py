"""A compiled program as XLA prints it: its text as data, and what its instructions send and multiply."""

from gspmd.audit.hlo.module import Array, Computation, Frame, HloError, Instruction, Module, parse

__all__ = ["Array", "Computation", "Frame", "HloError", "Instruction", "Module", "parse"]
