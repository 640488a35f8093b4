"""The largest allowed difference between two tenants, in granted and in served tokens.

What the counters of ``fairness`` promise (docs/architecture/fairness.md), for checks and reports: no decision
uses it. Pure.

    | W_a / w_a  -  W_b / w_b |   <=   2 * (D + (L + 3 * (E + U) + F) / w + F / w)   +   n * U / w

``W`` is the weighted service of tenants ``a`` and ``b`` in the interval, ``w_a`` and ``w_b`` their weights,
``w`` the smaller one. ``D`` is ``window_tokens``, ``L`` ``sequence_tokens``, ``F`` ``in_flight_tokens``,
``E`` ``estimate_tokens``, ``U`` ``unreported_tokens``, ``n`` ``failovers``. Derivation, with ``V`` the
counter and ``Y`` the counter with exact charges:

1. Counters differ from the truth by unreported tokens and wrong advances: ``|V - Y| <= e = (E + U) / w``.
2. A grant goes to a tenant near the minimum ``m(s)`` of the waiting counters: ``V_a(s) <= m(s) + D``. So
   until its next grant ``Y_a <= m(s) + D + L / w + e``.
3. No waiting tenant is far below: it had ``V >= m(s)`` at ``s``, or was lifted later at least to the floor,
   which is at least ``m(s) - F / w``. So ``Y >= m(s) - F / w - e``.
4. Therefore ``|Y_a - Y_b| <= D + (L + F) / w + 3 * e``; the third ``e`` covers lifted tenants. This is
   ``granted_bound``, for ``E + U > 0``.
5. Service equals ``Y`` less what sequences in flight still lack, 0 to ``F / w``. An interval has two ends:
   twice the sum.
6. A failover loses at most ``U / w``.
"""

from __future__ import annotations


def granted_bound(
    *,
    sequence_tokens: float,
    estimate_tokens: float,
    window_tokens: float,
    weight: float,
    in_flight_tokens: float = 0.0,
) -> float:
    """Return the most that is granted to one tenant beyond what is granted to another that waits as well,
    over their weights, sequences counted with what they turn out to cost.

    All in weighted tokens: ``sequence_tokens`` of the largest sequence, ``estimate_tokens`` by which the
    advances of what is in flight, together, may differ from that, ``in_flight_tokens`` all that is granted
    and not finished, which counts only where estimates may be wrong. ``window_tokens``: how far ahead a
    tenant may be that goes past one without room, over weight as the counters are. ``weight``: the smaller.
    """
    below = in_flight_tokens if estimate_tokens > 0.0 else 0.0
    return window_tokens + (sequence_tokens + 3.0 * estimate_tokens + below) / weight


def service_bound(
    *,
    sequence_tokens: float,
    in_flight_tokens: float,
    window_tokens: float,
    weight: float,
    estimate_tokens: float | None = None,
    unreported_tokens: float = 0.0,
    failovers: int = 0,
) -> float:
    """Return the most by which the service of two tenants differs, over their weights, in any interval in
    which both always had something waiting, in the same class, that may use the same workers.

    The other parameters are those of ``granted_bound``. ``in_flight_tokens`` is the cost of everything
    granted and not finished at one time (slots times the largest sequence at most), ``unreported_tokens``
    what workers produce for one tenant between two reports. Estimates are off by all of what is in flight at
    most, which is the default. Each of ``failovers`` of the leader in the interval loses one report's worth
    of a counter.
    """
    wrong = in_flight_tokens if estimate_tokens is None else estimate_tokens
    apart = granted_bound(
        sequence_tokens=sequence_tokens,
        estimate_tokens=wrong + unreported_tokens,
        window_tokens=window_tokens,
        weight=weight,
        in_flight_tokens=in_flight_tokens,
    )
    return 2.0 * (apart + in_flight_tokens / weight) + failovers * unreported_tokens / weight
