"""Mixture of experts: routers, dispatch and combine, losses, and a layer whose experts are sharded over a mesh."""

from typing import TYPE_CHECKING

from gspmd.deferred import deferred

if TYPE_CHECKING:
    from gspmd.moe.config import MoEConfig
    from gspmd.moe.dropless.grouped import grouped_matmul
    from gspmd.moe.layer import expert_layer
    from gspmd.moe.routers.routing import Routing
    from gspmd.moe.routers.table import route
    from gspmd.moe.slots import combine, dispatch

__all__ = ["MoEConfig", "Routing", "combine", "dispatch", "expert_layer", "grouped_matmul", "route"]

_HOMES = {
    ".config": "MoEConfig",
    ".dropless.grouped": "grouped_matmul",
    ".layer": "expert_layer",
    ".routers.routing": "Routing",
    ".routers.table": "route",
    ".slots": "combine dispatch",
}
__getattr__, __dir__ = deferred(__name__, _HOMES)
