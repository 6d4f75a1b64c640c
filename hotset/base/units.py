"""Units of memory, a function that prints them, and arithmetic with integers."""

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


def ceil_div(a: int, b: int) -> int:
    """Returns the least integer q with q * b >= a."""
    return -(-a // b)


def next_power_of_2(number: int) -> int:
    """Returns the smallest power of two that is at least `number`."""
    return 1 << max(0, number - 1).bit_length()


def show_bytes(count: float) -> str:
    """Formats bytes for messages: `1536 -> '1.5 KiB'`."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(count) >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"
