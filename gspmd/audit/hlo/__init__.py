"""Compiled programs: a parser of optimized HLO, and the bytes and FLOPs of its instructions."""

from gspmd.audit.hlo.module import Array, Computation, Frame, Instruction, Module
from gspmd.audit.hlo.parser import HloError, parse

__all__ = ["Array", "Computation", "Frame", "HloError", "Instruction", "Module", "parse"]
