"""Which bytes of a row travel."""

from dataclasses import dataclass

from hotset.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Slices:
    """Parts of each row: `spans[i]` is (first byte in the stored row, bytes). They are packed one after another.

    Raises ConfigError for spans that are empty, begin before the row, or share bytes.
    """

    spans: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        end = 0
        for first, nbytes in sorted(self.spans):
            if nbytes < 1 or first < end:
                raise ConfigError(f"slices {self.spans} of a row: bytes must be taken, and none of them twice")
            end = first + nbytes

    @property
    def nbytes(self) -> int:
        """Of one packed row."""
        return sum(nbytes for _, nbytes in self.spans)

    @property
    def end(self) -> int:
        """The bytes that a row must have."""
        return max((first + nbytes for first, nbytes in self.spans), default=0)
