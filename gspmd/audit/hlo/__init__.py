"""Compiled programs: the text of optimized HLO as data, and what its instructions send and multiply."""

from gspmd.audit.hlo.module import Array, Computation, Frame, Instruction, Module
from gspmd.audit.hlo.parser import HloError, parse

__all__ = ["Array", "Computation", "Frame", "HloError", "Instruction", "Module", "parse"]
