"""Routers, which choose the experts of each token and the weights of the experts' outputs, with balancing losses."""

from gspmd.moe.routers.routing import Routing, assigned
from gspmd.moe.routers.rule import Router, router
from gspmd.moe.routers.table import BY_NAME, named, route

__all__ = ["BY_NAME", "Router", "Routing", "assigned", "named", "route", "router"]
