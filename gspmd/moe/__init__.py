"""Mixture of experts: routers, dispatch and combine, their losses, and the layer whose experts lie across a mesh."""

from gspmd.moe.config import MoEConfig
from gspmd.moe.dispatch import combine, dispatch
from gspmd.moe.grouped import grouped_matmul
from gspmd.moe.layer import expert_layer
from gspmd.moe.platform import dispatch_form
from gspmd.moe.routers import route
from gspmd.moe.routing import Routing

__all__ = ["MoEConfig", "Routing", "combine", "dispatch", "dispatch_form", "expert_layer", "grouped_matmul", "route"]
