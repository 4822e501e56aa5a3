"""Settings of admission: shares of the queue, deadline refusals and retry reservations."""

from typing import Annotated

from serve_app.settings_base import (
    ADVANCED,
    INTERNAL,
    NOT_NEGATIVE,
    POSITIVE,
    POSITIVE_SHARE,
    at_least,
    settings,
    share_below,
)


@settings(block="admission")
class AdmissionSettings:
    """Who may wait, besides the bound `max_waiting` on all of them.

    Attributes:
        deadline_margin_ratio: a request is admitted when its predicted wait, increased by this share, ends
            before its deadline.
        min_observations: waits of its class and length that must have been seen before a prediction refuses.
        probe_interval_s: after this long without an observation the prediction for a kind of request is not
            trusted, and one request of that kind is admitted whatever is predicted.
        tenant_share: share of `max_waiting` that one tenant can fill when it is alone.
        reserved_share: share of `max_waiting` kept for each higher class: `default` leaves it free for
            `interactive`, `batch` leaves it free twice.
        max_reservations: most retry reservations at any time.
    """

    # The drain rate of a saturated fleet varies from one half-minute to the next.
    deadline_margin_ratio: Annotated[float, NOT_NEGATIVE, INTERNAL] = 0.2
    # A single wait may differ much from its prediction; the mean of five does not.
    min_observations: Annotated[int, at_least(1), INTERNAL] = 5
    # Well above the time between two dispatches of one kind under load, well below a client's timeout.
    probe_interval_s: Annotated[float, POSITIVE, INTERNAL] = 10.0
    # A fifth is left for tenants that arrive later; two heavy tenants get 44 % each, and a ninth is left.
    tenant_share: Annotated[float, POSITIVE_SHARE, ADVANCED] = 0.8
    reserved_share: Annotated[float, share_below(0.5).hint("batch leaves it free twice"), INTERNAL] = 0.1
    # Twice the default of `max_waiting`; about half a kilobyte each.
    max_reservations: Annotated[int, NOT_NEGATIVE, INTERNAL] = 4_000
