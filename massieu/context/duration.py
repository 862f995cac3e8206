"""Check of the duration of a training run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas

__all__ = ["why_too_short"]

FALL = 0.1
"""Largest fall of the error in the second half of the steps of a run that is long enough, as a share."""

EXCESS = 1.1
"""Error, in units of the best one, up to which a run is long enough even if its error falls."""


def why_too_short(
    history: pandas.DataFrame, curve: pandas.DataFrame, *, attainable: str | None = None, is_pooled: bool = False
) -> str | None:
    """Return a sentence on a run that used up its steps while its error still fell; None if it was long enough.

    Args:
        history: with the ``error`` of each measurement during training.
        curve: errors of the model and of predictors after several numbers of examples.
        attainable: the best predictor in reach of the model; None for the best one of the curve.
        is_pooled: training was on a pool of functions: then examples of others need not help.
    """
    own = curve[curve["predictor"] == "model"].set_index("examples")
    last, without = own.iloc[-1], float(own["error"].iloc[0])
    others = curve[(curve["predictor"] != "model") & (curve["examples"] == own.index[-1])].set_index("predictor")
    if not is_pooled and own.index[0] == 0 and last["error"] > (1 - FALL) * without:
        return (
            f"The run was too short to learn from examples: its error is {last['error']:.3g} after {own.index[-1]} of"
            f" them and {without:.3g} without any. Train for more steps."
        )
    errors = history["error"].tolist()
    half = errors[(len(errors) - 1) // 2] if len(errors) > 1 else None
    if half is None or others.empty or errors[-1] >= (1 - FALL) * half:
        return None
    name = attainable if attainable in others.index else str(others["error"].idxmin())
    best = others.loc[name]
    if last["error"] - 2 * last["standard_error"] <= EXCESS * best["error"]:
        return None
    times = f"{last['error'] / best['error']:.3g} times" if best["error"] > 1e-9 * last["error"] else "far above"
    return (
        f"The run was too short: the second half of its steps still lowered the error by"
        f" {100 * (1 - errors[-1] / half):.0f} %, and it is {times} that of {name}. Train for more steps."
    )
