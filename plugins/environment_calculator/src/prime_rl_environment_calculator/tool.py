"""The calculator, and how a reply calls it."""

from __future__ import annotations

import re

CALL_START = "<tool_call>"
CALL_END = "</tool_call>"
REFUSAL = "error"
"""What the calculator answers when it cannot read the expression."""

_EXPRESSION = re.compile(r"(-?[0-9]{1,6}) (add|sub) (-?[0-9]{1,6})")


def calculate(expression: str) -> str:
    """`a add b` or `a sub b` with whole numbers of at most six digits; `error` for anything else."""
    found = _EXPRESSION.fullmatch(expression)
    if found is None:
        return REFUSAL
    left, operation, right = int(found[1]), found[2], int(found[3])
    return str(left + right if operation == "add" else left - right)


def written_call(expression: str) -> str:
    """The reply that asks the calculator for `expression`."""
    return f"{CALL_START}{expression}{CALL_END}"


def called_expression(reply: str) -> str | None:
    """What a reply asks the calculator; None when it is an answer.

    A reply that has the start of a call in it is one. Whatever stands beside the call, or in place
    of its end, belongs to the expression, which the calculator will then refuse.
    """
    if CALL_START not in reply:
        return None
    return reply.removeprefix(CALL_START).removesuffix(CALL_END)
