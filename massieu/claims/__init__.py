"""Every statement of the sources as an experiment with a verdict that can go wrong."""

from __future__ import annotations

from massieu.claims.claim import Claim, Curve, Evidence, Gap, Trial, Verdict, judge, worst
from massieu.claims.registry import all_claims, claim, select
from massieu.claims.runner import Result, Results, examine, verify

__all__ = [
    "Claim",
    "Curve",
    "Evidence",
    "Gap",
    "Result",
    "Results",
    "Trial",
    "Verdict",
    "all_claims",
    "claim",
    "examine",
    "judge",
    "select",
    "verify",
    "worst",
]
