"""The audit of compiled programs: their collectives, memory and time, also on machines that are not attached."""

from typing import TYPE_CHECKING

from gspmd.deferred import deferred

if TYPE_CHECKING:
    from gspmd.audit.hlo import HloError
    from gspmd.audit.ledgers.comparison import Comparison
    from gspmd.audit.ledgers.entries import Entry
    from gspmd.audit.ledgers.ledger import Ledger, compare
    from gspmd.audit.ledgers.reader import ledger
    from gspmd.audit.offline.compilation import compile_offline
    from gspmd.audit.offline.options import check_compiler_options
    from gspmd.audit.offline.report import Report
    from gspmd.audit.offline.topology import Topology, slices, topology
    from gspmd.audit.simulation import gantt, perfetto
    from gspmd.audit.simulation.simulator import timeline
    from gspmd.audit.simulation.timeline import Timeline
    from gspmd.audit.verification.result import Parting, Verification
    from gspmd.audit.verification.verifier import verify

__all__ = [
    "Comparison",
    "Entry",
    "HloError",
    "Ledger",
    "Parting",
    "Report",
    "Timeline",
    "Topology",
    "Verification",
    "check_compiler_options",
    "compare",
    "compile_offline",
    "gantt",
    "ledger",
    "perfetto",
    "slices",
    "timeline",
    "topology",
    "verify",
]

_HOMES = {
    ".hlo": "HloError",
    ".ledgers.comparison": "Comparison",
    ".ledgers.entries": "Entry",
    ".ledgers.ledger": "Ledger compare",
    ".ledgers.reader": "ledger",
    ".offline.compilation": "compile_offline",
    ".offline.options": "check_compiler_options",
    ".offline.report": "Report",
    ".offline.topology": "Topology slices topology",
    ".simulation": "gantt perfetto",
    ".simulation.simulator": "timeline",
    ".simulation.timeline": "Timeline",
    ".verification.result": "Parting Verification",
    ".verification.verifier": "verify",
}
__getattr__, __dir__ = deferred(__name__, _HOMES)
