"""The functions of httpx for http:// addresses, without TLS certificates.

By default, httpx loads the certificates for every call and every client, which takes 50 ms of CPU time.
"""

import json
from functools import partial
from typing import Any

import httpx

get = partial(httpx.get, verify=False)
post = partial(httpx.post, verify=False)
request = partial(httpx.request, verify=False)
stream = partial(httpx.stream, verify=False)
Client = partial(httpx.Client, verify=False)


def events_of(stream: httpx.Response) -> list[Any]:
    """Returns all events of a stream, parsed except for [DONE]."""
    data = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
    return [event if event == "[DONE]" else json.loads(event) for event in data]


def refuses_connections(url: str) -> bool:
    """Returns whether nothing listens at `url`. A server that closes its socket may still disconnect a client whose
    connection the kernel had accepted; that is not a refusal yet."""
    try:
        get(f"{url}/health", timeout=10)
    except httpx.ConnectError:
        return True
    except httpx.TransportError:
        return False
    return False
