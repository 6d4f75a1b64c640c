"""A decode worker accepts only some prefill workers from the headers of a request."""

import pytest

from hotset.base.errors import NotAllowed
from hotset.serve.prefill_header import PREFILL_HEADER, SIGNATURE_HEADER, check_prefill, prefill_headers

SECRET = "at-least-16-characters"
ADDRESS = "10.0.0.1:7001"


def test_an_address_is_accepted_only_with_its_own_signature() -> None:
    signed = dict(prefill_headers(ADDRESS, SECRET))
    check_prefill(signed, secret=SECRET, http_host="0.0.0.0")
    for forged in (
        {PREFILL_HEADER: ADDRESS},
        {PREFILL_HEADER: "127.0.0.1:7001"},
        {PREFILL_HEADER: "10.0.0.2:7001", SIGNATURE_HEADER: signed[SIGNATURE_HEADER]},
        {**signed, SIGNATURE_HEADER: ""},
        {**signed, SIGNATURE_HEADER: "\xff\u20ac"},
        dict(prefill_headers(ADDRESS, SECRET + "!")),
    ):
        with pytest.raises(NotAllowed, match="HOTSET_HANDOFF_SECRET"):
            check_prefill(forged, secret=SECRET, http_host="127.0.0.1")


@pytest.mark.parametrize(
    ("address", "http_host", "accepted"),
    [
        ("127.0.0.1:7001", "127.0.0.1", True),
        ("[::1]:7001", "::1", True),
        ("127.0.0.1:7001", "localhost", True),
        ("127.0.0.1:7001", "0.0.0.0", False),
        ("127.0.0.1:7001", "10.0.0.2", False),
        ("10.0.0.1:7001", "127.0.0.1", False),
        ("metadata.internal:80", "127.0.0.1", False),
    ],
)
def test_without_a_secret_only_loopback_addresses_are_accepted_and_only_on_a_loopback_port(
    address: str, http_host: str, accepted: bool
) -> None:
    headers = dict(prefill_headers(address, None))
    if accepted:
        check_prefill(headers, secret=None, http_host=http_host)
    else:
        with pytest.raises(NotAllowed, match="loopback"):
            check_prefill(headers, secret=None, http_host=http_host)
