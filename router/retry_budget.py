"""How many internal errors may be answered by another try: a share of the requests.

A budget keeps a fleet that fails everything from getting every request several times over
(the idea of Finagle's RetryBudget). Refusals, drains and deaths before the first token are
outside of it: they say nothing about the request.
"""

RATIO = 0.1
_MAX_BALANCE = 10.0


class RetryBudget:
    """Each request adds a tenth of a retry, up to ten; the first one is there from the start."""

    def __init__(self) -> None:
        self._balance = 1.0

    def deposit(self) -> None:
        """A request was given to a worker for the first time."""
        self._balance = min(self._balance + RATIO, _MAX_BALANCE)

    def withdraw(self) -> bool:
        """Take one retry, if there is one."""
        # Ten tenths are one: sums of floats are not quite.
        if self._balance < 1.0 - 1e-9:
            return False
        self._balance -= 1.0
        return True
