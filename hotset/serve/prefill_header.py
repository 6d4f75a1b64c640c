"""The headers with which a router names the prefill worker of a request to a decode worker.

A decode worker connects to the address that it is given. Without a check, any client of its HTTP port could make it
connect to any host and port. Router and workers therefore share the handoff secret, and the router signs the address.
Without a secret, all workers are on one machine: the address must be a loopback address, and the HTTP port must not be
reachable from other machines.
"""

import hashlib
import hmac
from collections.abc import Mapping

from hotset.base.address import Address, is_loopback
from hotset.base.errors import NotAllowed

PREFILL_HEADER = "x-hotset-prefill"  # the control address of the prefill worker that computes the prompt
SIGNATURE_HEADER = "x-hotset-prefill-signature"


def prefill_headers(address: str, secret: str | None) -> list[tuple[str, str]]:
    """Returns the headers of a request whose prompt is computed by the prefill worker at `address`."""
    headers = [(PREFILL_HEADER, address)]
    return headers if secret is None else [*headers, (SIGNATURE_HEADER, _signature(address, secret))]


def check_prefill(headers: Mapping[str, str], *, secret: str | None, http_host: str) -> None:
    """Raises NotAllowed unless the router of this decode worker chose the address in PREFILL_HEADER.

    `http_host` is the address on which the decode worker serves HTTP.
    """
    address = headers[PREFILL_HEADER]
    if secret is not None:
        given = headers.get(SIGNATURE_HEADER, "")
        if not hmac.compare_digest(given.encode("latin-1", "replace"), _signature(address, secret).encode()):
            raise NotAllowed(
                f"{PREFILL_HEADER} is not signed with this worker's handoff secret; send requests to the router, and "
                "start the router with the same secret (HOTSET_HANDOFF_SECRET)"
            )
        return
    parsed = Address.parse(address)
    if parsed is not None and not (is_loopback(parsed.host) and is_loopback(http_host)):
        raise NotAllowed(
            f"without a handoff secret, {PREFILL_HEADER} may only name loopback addresses, and only if the worker "
            f"serves HTTP on loopback (here: {http_host}); start router and workers with HOTSET_HANDOFF_SECRET"
        )


def _signature(address: str, secret: str) -> str:
    return hmac.new(secret.encode(), f"{PREFILL_HEADER}: {address}".encode(), hashlib.sha256).hexdigest()
