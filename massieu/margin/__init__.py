"""Attention as max-margin token selection: the programs, their certificates, and how training approaches them."""

from massieu.margin.data import random_problem
from massieu.margin.descent import descend
from massieu.margin.finite import FiniteComponent, Split, finite_component, next_token_component
from massieu.margin.gradients import LogGap, LogGradient, log_gap, log_gradient, misalignment
from massieu.margin.graph import GraphMargin, TokenGraph, graph_margin, token_graph
from massieu.margin.path import (
    LocalOptimality,
    RegularizationPath,
    locally_optimal,
    path_bound,
    regularization_path,
    selections_reached,
)
from massieu.margin.problem import Assumptions, TokenSelection
from massieu.margin.report import SelectionReport, selection_report
from massieu.margin.solver import MaxMargin, direction_bound, max_margin
from massieu.margin.trajectory import Trajectory

__all__ = [
    "Assumptions",
    "FiniteComponent",
    "GraphMargin",
    "LocalOptimality",
    "LogGap",
    "LogGradient",
    "MaxMargin",
    "RegularizationPath",
    "SelectionReport",
    "Split",
    "TokenGraph",
    "TokenSelection",
    "Trajectory",
    "descend",
    "direction_bound",
    "finite_component",
    "graph_margin",
    "locally_optimal",
    "log_gap",
    "log_gradient",
    "max_margin",
    "misalignment",
    "next_token_component",
    "path_bound",
    "random_problem",
    "regularization_path",
    "selection_report",
    "selections_reached",
    "token_graph",
]
