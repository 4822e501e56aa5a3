"""A capture: the requests of the last minutes as a trace, with their lengths and times and without any text.

Lines are as in Mooncake's traces, so other tools read them. Tenants get a name that says nothing, the same in
all captures of one process; hashes of prompts are left out, since whoever guesses a prompt could find it.
"""

import hashlib
import secrets
from collections.abc import Iterable
from typing import Any

from serve_app.errors import Outcome
from serve_app.serving.scheduler.receipts.receipt import Receipt

_SALT = secrets.token_bytes(16)


def captured(receipts: Iterable[Receipt]) -> list[dict[str, Any]]:
    """A line for each request that completed and whose tokens its engine counted, by arrival."""
    counted = [
        (receipt, receipt.usage)
        for receipt in receipts
        if receipt.conclude.conclusion.outcome is Outcome.COMPLETED and receipt.usage is not None
    ]
    counted.sort(key=lambda pair: pair[0].arrived_at)
    return [
        {
            "timestamp": round((receipt.arrived_at - counted[0][0].arrived_at) * 1e3, 3),
            "input_length": usage.prompt_tokens,
            "output_length": usage.output_tokens,
            "hash_ids": [],
            "tenant": pseudonym(receipt.tenant),
            "priority": receipt.priority,
        }
        for receipt, usage in counted
    ]


def pseudonym(tenant: str) -> str:
    """The name of a tenant that says nothing; the same as long as this process lives."""
    return "t" + hashlib.blake2b(tenant.encode(), key=_SALT, digest_size=6).hexdigest()
