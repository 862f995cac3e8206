"""Documents of a dataset by name."""

from __future__ import annotations

from collections.abc import Iterator

from massieu.checks import UserError

__all__ = ["read_dataset"]


def read_dataset(name: str, *, column: str = "text") -> Iterator[str | None]:
    """Stream the documents of a dataset on the Hugging Face hub, ``NAME[:CONFIG[:SPLIT]]``; SPLIT defaults to "train".

    A row without a string gives None.
    """
    try:
        import datasets
    except ImportError:
        raise UserError("--dataset needs the package datasets, which is not installed; pip install datasets") from None
    place, config, split = (*name.split(":"), "", "")[:3]
    try:
        for row in datasets.load_dataset(place, config or None, split=split or "train", streaming=True):
            text = row[column]
            if not isinstance(text, str):
                yield None
            elif text.strip():
                yield text
    except KeyError:
        raise UserError(f"{name} has no column {column}; name the one that holds the text with --column") from None
    except Exception as error:  # any error of the hub, the network or a loading script
        raise UserError(f"the dataset {name} cannot be read ({' '.join(str(error).split())[:160]})") from error
