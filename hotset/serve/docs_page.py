"""GET /docs: Swagger UI over /openapi.json. Everything that the page loads comes from this server."""

from importlib.resources import files
from pathlib import Path

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, HTMLResponse, Response

# Files of Swagger UI, which the package fastapi-swagger contains.
SWAGGER_UI = Path(str(files("fastapi_swagger.resources")))
SWAGGER_FILES = ("swagger-ui-bundle.js", "swagger-ui.css", "favicon-32x32.png")
# The browser loads nothing from elsewhere, even if a later Swagger UI or the OpenAPI document refers to it. Images in
# the style sheet are data URLs.
HEADERS = {"Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'"}
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Hotset API</title>
<link rel="icon" href="/docs/favicon-32x32.png">
<link rel="stylesheet" href="/docs/swagger-ui.css">
</head>
<body>
<noscript>This page needs JavaScript. <a href="/openapi.json">openapi.json</a> describes the same endpoints.</noscript>
<div id="swagger-ui"></div>
<script src="/docs/swagger-ui-bundle.js"></script>
<script src="/docs/start.js"></script>
</body>
</html>
"""
# A separate file, because the policy forbids scripts inside the page. Without `validatorUrl: null`, Swagger UI would
# send the address of the document to a service of its authors.
START = """SwaggerUIBundle({
  url: "/openapi.json", dom_id: "#swagger-ui", deepLinking: true, validatorUrl: null, displayRequestDuration: true,
});
"""


def docs_routes() -> APIRouter:
    """Returns the page and its files. None of these paths needs the API key (see `middleware.PUBLIC_PATHS`)."""
    routes = APIRouter(include_in_schema=False)

    @routes.get("/docs")
    async def page() -> Response:
        return HTMLResponse(PAGE, headers=HEADERS)

    @routes.get("/docs/{name}")
    async def file(name: str) -> Response:
        if name == "start.js":
            return Response(START, media_type="text/javascript")
        if name not in SWAGGER_FILES:
            raise HTTPException(404)
        return FileResponse(SWAGGER_UI / name)

    return routes
