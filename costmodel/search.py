"""The first whole number for which something holds that goes on holding."""

LIMIT = 2**24  # tokens; a length beyond it is none


def first_where(holds, start=1, limit=LIMIT):
    """The least whole number from `start` to `limit` for which `holds`; None if there is none.

    Parameters
    ----------
    holds : callable
        Of a whole number; once true it stays true.  It is asked some
        2 * log2(answer) times: steps that double, then a bisection.
    """
    step = 1
    fails, found = start - 1, start
    while not holds(found):
        if found == limit:
            return None
        fails, found = found, min(found + step, limit)
        step *= 2
    while found - fails > 1:
        middle = (found + fails) // 2
        if holds(middle):
            found = middle
        else:
            fails = middle
    return found
