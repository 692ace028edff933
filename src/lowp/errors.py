"""Errors that name the operation, the rule, the value and the remedy."""

from __future__ import annotations

from typing import NoReturn


class Unsupported(NotImplementedError):
    """A valid request that this build, device or torch version cannot carry out."""


_NOTHING = object()


def message(op: str, rule: str, got: object = _NOTHING, hint: str = "") -> str:
    """`op: rule, got X. Hint.`"""
    text = f"{op}: {rule}"
    if got is not _NOTHING:
        text += f", got {got}"
    return f"{text}. {hint}".rstrip()


def fail(
    op: str, rule: str, *, got: object = _NOTHING, hint: str = "", error: type[Exception] = ValueError
) -> NoReturn:
    """Raise `error` with a full message: for hot paths, where `got` is worth making only if the rule is broken."""
    raise error(message(op, rule, got, hint))


def require(
    condition: bool,
    op: str,
    rule: str,
    *,
    got: object = _NOTHING,
    hint: str = "",
    error: type[Exception] = ValueError,
) -> None:
    """Raise `error` with a full message unless `condition` holds.

    Args:
        condition: the rule's outcome.
        op: the operation that the user called.
        rule: what must hold, as a phrase.
        got: the offending value.
        hint: what to do about it, as a sentence.
        error: the exception's class.
    """
    if not condition:
        fail(op, rule, got=got, hint=hint, error=error)
