"""Compiled programs: the text of optimized HLO as data, with the bytes and the products of its instructions."""

from gspmd.audit.hlo.module import Array, Computation, Frame, Instruction, Module
from gspmd.audit.hlo.parser import HloError, parse

__all__ = ["Array", "Computation", "Frame", "HloError", "Instruction", "Module", "parse"]
