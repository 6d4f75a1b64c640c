"""The functions of httpx for http:// addresses, without TLS certificates.

By default, httpx loads the certificates for every call and every client, which takes 50 ms of CPU time.
"""

from functools import partial

import httpx

get = partial(httpx.get, verify=False)
post = partial(httpx.post, verify=False)
request = partial(httpx.request, verify=False)
stream = partial(httpx.stream, verify=False)
Client = partial(httpx.Client, verify=False)
