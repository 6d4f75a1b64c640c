"""The live page: one HTML file with its script and its style. The browser loads nothing else."""

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from starlette.responses import HTMLResponse, Response


def page_response() -> Response:
    """Returns the live page. Its policy allows only the script and the style in it, and requests to this server."""
    html, policy = _page()
    return HTMLResponse(html, headers={"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer"})


@cache
def _page() -> tuple[str, str]:
    html = (files("hotset.serve") / "page.html").read_text()
    directives = [
        "default-src 'none'",
        f"script-src {_hash_of('script', html)}",
        f"style-src {_hash_of('style', html)}",
        "img-src data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    return html, "; ".join(directives)


def _hash_of(tag: str, html: str) -> str:
    """Returns the source expression that allows the one element of this kind."""
    (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
