"""Errors read `op: rule, got X. Hint.` and have the class that the caller asked for."""

import pytest

import lowp
from lowp.errors import fail, message, require


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "cast: x must be 2-D."),
        ({"got": (3,)}, "cast: x must be 2-D, got (3,)."),
        ({"got": None}, "cast: x must be 2-D, got None."),
        ({"hint": "Flatten it."}, "cast: x must be 2-D. Flatten it."),
        ({"got": 0, "hint": "Flatten it."}, "cast: x must be 2-D, got 0. Flatten it."),
    ],
)
def test_the_message_is_op_rule_got_hint(arguments, text):
    assert message("cast", "x must be 2-D", **arguments) == text
    for raise_ in (fail, lambda *args, **kwargs: require(False, *args, **kwargs)):
        with pytest.raises(ValueError) as caught:  # noqa: PT011  the text is compared below
            raise_("cast", "x must be 2-D", **arguments)
        assert str(caught.value) == text


def test_require_does_nothing_where_the_rule_holds():
    require(True, "cast", "x must be 2-D", got=(3,), hint="Flatten it.", error=TypeError)


@pytest.mark.parametrize("error", [TypeError, lowp.Unsupported])
def test_the_class_is_the_callers(error):
    with pytest.raises(error, match=r"^cast: no, got 1\.$"):
        require(False, "cast", "no", got=1, error=error)


def test_unsupported_is_a_not_implemented_error():
    assert issubclass(lowp.Unsupported, NotImplementedError)
