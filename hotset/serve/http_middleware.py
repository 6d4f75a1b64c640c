"""The base of middleware for HTTP requests."""

from starlette.types import ASGIApp, Receive, Scope, Send


class HttpMiddleware:
    """Passes everything but HTTP requests on unchanged."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self.handle(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, or passes it on to `_app`."""
        raise NotImplementedError
