"""The least norm under some constraints, by the solver of that norm, in the units of the data."""

from __future__ import annotations

from decimal import ROUND_CEILING, Context

from massieu.margin.frobenius import least_frobenius
from massieu.margin.nuclear import least_nuclear
from massieu.margin.program import CANCEL, RESOLUTION, Program, Solved, one_thread

__all__ = ["checked_tolerance", "least_norm", "rounded_up", "sentence"]


def checked_tolerance(norm: str, tolerance: float | None, rounds: int) -> float:
    """The tolerance, or the usual one of the norm; a sentence where a request makes no sense."""
    if norm not in ("fro", "nuc"):
        raise ValueError(f"norm must be 'fro' or 'nuc', got {norm!r}")
    tolerance = (1e-10 if norm == "fro" else 1e-6) if tolerance is None else tolerance
    if not 0 < tolerance < 1 or not isinstance(rounds, int) or rounds < 1:
        raise ValueError(
            f"tolerance must be between zero and one and rounds at least one, got {tolerance} and {rounds}"
        )
    return tolerance


def least_norm(program: Program, norm: str, *, tolerance: float, rounds: int) -> Solved:
    """Solve a program on one thread."""
    solver = least_frobenius if norm == "fro" else least_nuclear
    with one_thread():
        return program.natural(solver(program, tolerance=tolerance, rounds=rounds))


def sentence(feasible: bool | None, converged: bool, asked: bool, gap: float, eps: float) -> str:
    """How a solver ended."""
    if not asked:
        return "nothing was asked: all tokens are tied"
    if feasible and converged:
        return f"solved: the bounds agree to {gap:.0e}"
    if feasible:
        return f"stopped early: feasible, but the bounds agree only to {gap:.0e}; raise rounds"
    if feasible is False:
        return f"infeasible: constraints of size one cancel to less than {CANCEL:.0e}, so no weights have a margin"
    undecided = f"undecided: no margin was found, and none above {rounded_up(eps)} exists"
    return f"{undecided}; margins below {RESOLUTION:.0e} are not always resolved, so raise rounds or rescale the data"


def rounded_up(bound: float) -> str:
    """An upper bound with one digit, so that what is printed is an upper bound too.

    Example:
        >>> rounded_up(2.4985e-11), rounded_up(0.25), rounded_up(0.0)
        ('3e-11', '0.3', '0')
    """
    return f"{float(Context(prec=1, rounding=ROUND_CEILING).create_decimal_from_float(bound)):.1g}"
