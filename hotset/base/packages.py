"""Checks that the packages of an extra are installed, before a command imports them."""

import importlib.util

from hotset.base.errors import MissingDependency

SERVE_PACKAGES = (
    "aiohttp",
    "fastapi",
    "fastapi_swagger",
    "prometheus_client",
    "pydantic",
    "starlette",
    "uvicorn",
    "yarl",
)
EXTRAS = {"serve": SERVE_PACKAGES, "cluster": ("ray", "yaml")}


def check_packages(program: str, *extras: str) -> None:
    """Raises MissingDependency, with the command to install it, if a package of an extra is missing."""
    for extra in extras:
        for package in EXTRAS[extra]:
            if importlib.util.find_spec(package) is None:
                raise MissingDependency(f'the {program} needs {package}; run: pip install "hotset[{",".join(extras)}]"')
