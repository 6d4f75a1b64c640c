"""What `hotset cluster` asks every node before it starts anything.

Ray sends this function by value, so that it also runs on a node without Hotset. It must not import anything else of
Hotset at the top.
"""

import platform


def probe_node() -> dict[str, str | None]:
    """Returns the versions of Python and Hotset on this node. The version of Hotset is None if it is not installed."""
    try:
        from hotset import __version__
    except ImportError:
        return {"python": platform.python_version(), "hotset": None}
    return {"python": platform.python_version(), "hotset": __version__}
