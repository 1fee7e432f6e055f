"""Mixture of experts: routers, dispatch and combine, their losses, and the layer whose experts lie across a mesh."""

from gspmd.moe.config import MoEConfig
from gspmd.moe.dispatch import combine, dispatch
from gspmd.moe.layer import expert_layer
from gspmd.moe.routers import route
from gspmd.moe.routing import Routing

__all__ = ["MoEConfig", "Routing", "combine", "dispatch", "expert_layer", "route"]
