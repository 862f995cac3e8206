"""Made-up results of ``massieu verify``."""

GAP = {"measured": 0.5, "allowed": 1e-9, "share": 5e8}
SMALL = {"measured": 1e-12, "allowed": 1e-9, "share": 1e-3}
CURVE = {"x": [1, 10, 100], "series": {"error": [1.0, 0.3, None], "<law>": [1.0, 0.32, 0.1]}, "x_label": "tokens"}
CURVE |= {"y_label": "error", "log_x": True, "log_y": True}


def verdict(key: str, name: str, **more: object) -> dict[str, object]:
    """One result."""
    return {
        **{"key": key, "source": "a book", "place": "<b>page</b> 1", "title": "B_G = KL"},
        **{"wording": "B_G(η_1, η_2) = <script>.", "reading": "It is.", "reference": "a sum", "formula": "x_1^2"},
        **{"correction": "", "verdict": name, "expected": name, "printed": GAP, "control": GAP, "corrected": None},
        **{
            "conditional": None,
            "instead": None,
            "table": {"κ_3": 0.25},
            "seconds": 0.1,
            "reason": "",
            "code": "a.py:1",
        },
        **{"decisive": GAP, "listing": "def run(trial):\n    return '<b>'", "curve": None},
        **more,
    }


def verdicts() -> list[dict[str, object]]:
    """One of every kind."""
    return [
        verdict("C1", "HOLDS", printed=SMALL, decisive=SMALL, curve=CURVE),
        verdict("C2", "HOLDS_CORRECTED", corrected=SMALL, decisive=SMALL, correction="a sign"),
        verdict("C3", "CONDITIONAL", conditional=SMALL, decisive=SMALL, correction="if it spans"),
        verdict("C4", "FAILS", instead=SMALL),
        verdict("C5", "UNDECIDED", expected="HOLDS", printed=None, control=None, decisive=None, reason="it <raised>"),
        verdict(
            "C6",
            "UNDECIDED",
            expected=None,
            printed={"measured": None, "allowed": 1.0, "share": None},
            reason="not finite",
        ),
    ]
