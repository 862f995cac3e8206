"""Made-up results of ``massieu learn --json``."""

EVIL = "<script>window.hacked = 1</script>"


def learned(model: str = "softmax", pool: int | None = None, name: str = "tree") -> dict[str, object]:
    """Return a run of a model with one predictor of the given name, measured on few tasks."""
    curve, cosines = [], []
    for predictor, level in (("model", 1.2), ("ridge (Bayes)", 1.0), ("least squares", 1.5), ("gradient step", 2.0)):
        for examples in range(5):
            error = 5.0 if not examples else 1e4 if predictor == "least squares" and examples == 2 else level / examples
            curve.append(_row(predictor, examples, error, 8192))
            if predictor != "model" and examples in (2, 4):
                cosine = {"cosine": 1 - level / 10, "least_cosine": 0.25, "difference": 0.125}
                cosine |= {"standard_error": 0.002, "behind": (level - 1) / 10, "behind_error": 0.003}
                cosines.append({"predictor": predictor, "examples": examples, **cosine})
    curve += [_row(name, examples, 3.0, 64) for examples in (2, 4)]
    shared = {
        "learner": "ridge (Bayes)",
        "tasks": 2048,
        "model_error": 0.375,
        "learning_error": 0.25,
        "to_learning": 0.0625,
    }
    recalled = (
        {"retrieval_error": 2.5, "to_retrieval": 3.5} if pool else {"retrieval_error": None, "to_retrieval": None}
    )
    conditions = ["pool", "novel", "shuffled"] if pool else ["novel", "shuffled"]
    end = {"apart": 4.0, "share": 0.875, "share_error": 0.0125, "follows": "learning"}
    return {
        "facts": {
            "task": {
                "class": "Linear",
                "dim": 2,
                "noise": 0.5,
                "covariance": [[1.0, 0.0], [0.0, 1.0]],
                "outputs": None,
            },
            "recipe": {"model": model, "examples": 4, "pool": pool, "target": None},
            **{"parameters": 1234, "seconds": 3.0, "cpu_seconds": 2.5, "ended": "steps", "too_short": None},
        },
        "history": [{"step": step, "loss": 3.0, "rate": 0.01, "error": 100 / step} for step in (100, 200)],
        "shifts": [
            {"shift": shift, **_row(predictor, 4, error * size, 512)}
            for shift, size in (("none", 1.0), ("scale 3", 9.0))
            for predictor, error in (("model", 0.5), ("ridge (Bayes)", 0.25), ("zero", 5.0))
        ],
        "hypotheses": [{"condition": each, **shared, **recalled, **end} for each in conditions],
        "curve": curve,
        "sensitivities": cosines,
        "slopes": {"model": [[0.5, -1.0]], "ridge (Bayes)": [[0.25, -1.0]], "gradient step": [[0.0, 0.0]]},
        "matrices": None
        if model == "softmax"
        else {
            **{"learned": [[0.5, -0.125], [0.0, 0.5]], "closed form": [[0.625, 0.0], [0.0, 0.625]]},
            **{"loss": 1.01, "best loss": 1.0, "measured": 1.02, "best measured": 1.005},
        },
    }


def _row(predictor: str, examples: int, error: float, tasks: int) -> dict[str, object]:
    return {"predictor": predictor, "examples": examples, "error": error, "standard_error": 0.01, "tasks": tasks}
