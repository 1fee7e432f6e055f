"""What the compiler made of it: ledgers, machines one does not have, memory, and time."""

from gspmd.audit import gantt, perfetto
from gspmd.audit.compare import Comparison, compare
from gspmd.audit.hlo import HloError
from gspmd.audit.ledger import Entry, Ledger, ledger
from gspmd.audit.offline import Report, compile_offline
from gspmd.audit.timeline import Timeline, timeline
from gspmd.audit.topology import Topology, slices, topology
from gspmd.audit.verify import Parting, Verification, verify

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
