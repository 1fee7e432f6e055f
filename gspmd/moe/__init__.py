"""Mixture of experts: routers, dispatch and combine, their losses, and the layer whose experts lie across a mesh."""

from gspmd.moe.config import MoEConfig
from gspmd.moe.dropless.grouped import grouped_matmul
from gspmd.moe.dropless.platform import dispatch_form
from gspmd.moe.layer import expert_layer
from gspmd.moe.routers.routing import Routing
from gspmd.moe.routers.table import route
from gspmd.moe.slots import combine, dispatch

__all__ = ["MoEConfig", "Routing", "combine", "dispatch", "dispatch_form", "expert_layer", "grouped_matmul", "route"]
