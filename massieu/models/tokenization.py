"""Tokenization with one-sentence errors, and limits on unknown words."""

from __future__ import annotations

from typing import Any

from massieu.checks import UserError, visible

__all__ = ["check_known", "encode", "has_words", "share_note", "unknown_token"]

MOST_UNKNOWN = 1 / 3
"""Largest share of unknown tokens in a text."""

MADE_UP = 512
"""More tokens than in any tokenizer that transformers makes up for missing files."""

ROLES = ("bos", "eos", "pad", "cls", "sep", "mask")


def encode(tokenizer: Any, text: str | list[str], **options: Any) -> Any:
    """Tokenize a text; errors of the tokenizer become one sentence."""
    try:
        return tokenizer(text, verbose=False, **options)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of Rust is no Exception
        why = visible(" ".join(f"{type(error).__name__}: {error}".split()))[:160]
        raise UserError(
            f"the tokenizer cannot read the text {_shown(text)} ({why}); save the tokenizer of the model again"
        ) from error


def _shown(text: str | list[str]) -> str:
    """Beginning of a text, in quotes."""
    first = text if isinstance(text, str) else next(iter(text), "")
    return repr(first[:40] + ("..." if len(first) > 40 else ""))


def unknown_token(tokenizer: Any) -> int | None:
    """Return the token for words outside of the vocabulary; None without one, or if it has another role."""
    own: int | None = getattr(tokenizer, "unk_token_id", None)
    named = {getattr(tokenizer, f"{role}_token_id", None) for role in ROLES}
    return None if own in named else own


def has_words(tokenizer: Any) -> bool:
    """Return whether a tokenizer has more than special tokens and one more, such as that of a space.

    For missing files transformers makes up a tokenizer of special tokens, to which every text is unknown or empty.
    """
    if not hasattr(tokenizer, "get_vocab") or (hasattr(tokenizer, "__len__") and len(tokenizer) > MADE_UP):
        return True
    special = {*getattr(tokenizer, "all_special_tokens", ()), *getattr(tokenizer, "added_tokens_encoder", ())}
    return len({*tokenizer.get_vocab()} - special) > 1


def check_known(unknown: int, tokens: int, what: str) -> None:
    """Raise if more than a third of the tokens of a text are unknown."""
    if unknown > MOST_UNKNOWN * tokens:
        raise UserError(
            f"the tokenizer does not know {unknown:,} of {tokens:,} tokens of {what}, more than a third, so that the"
            " model would read one token for all of them; pass a text of the kind that the model reads, or save the"
            " tokenizer that it was trained with in its folder (tokenizer= in Python)"
        )


def share_note(unknown: int, tokens: int) -> list[str]:
    """Return a note on the share of unknown tokens; none if all are known.

    Example:
        >>> share_note(3, 200)
        ['The tokenizer does not know 3 of 200 tokens (1.5 %): the model reads one token for all of them.']
    """
    if not unknown:
        return []
    share = f"{unknown} of {tokens} tokens ({100 * unknown / tokens:.2g} %)"
    return [f"The tokenizer does not know {share}: the model reads one token for all of them."]
