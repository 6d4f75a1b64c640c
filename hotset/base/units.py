"""Units of memory, a function that prints them, and a division that rounds up."""

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


def ceil_div(a: int, b: int) -> int:
    """Returns the least integer q with q * b >= a."""
    return -(-a // b)


def show_bytes(count: float) -> str:
    """Formats bytes for messages: `1536 -> '1.5 KiB'`."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(count) >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"
