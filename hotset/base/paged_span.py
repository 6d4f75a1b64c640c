"""Describes at which addresses of paged memory the rows of a context are. Processes exchange these descriptions."""

from dataclasses import dataclass

from hotset.base.units import ceil_div


@dataclass(frozen=True, slots=True)
class PagedSpan:
    """Addresses of rows in pages, for every layer; or of index keys in pages, for every index group.

    In code about spans, *row* also stands for an index key and *layer* for an index group. A page has `len(bases[0])`
    parts of `part_rows` consecutive rows; a page of rows, and a page in host memory, has one part. The parts of a
    context are numbered through all its pages. Rows [n * part_rows, (n + 1) * part_rows) of layer i are in part
    n * step + i * step // len(bases). With a `step` above 1, layers take turns in using the parts of a page.

    Row r of part q of page number n in layer i begins at bases[i][q] + n * page_bytes + r * row_bytes.
    """

    bases: tuple[tuple[int, ...], ...]  # [layers][parts] addresses of page 0 (see transfer/workers.py)
    page_bytes: int  # distance between the same part of consecutive pages
    part_rows: int
    row_bytes: int  # distance between consecutive rows
    step: int = 1

    def first_part(self, layer: int) -> int:
        """Returns the part of a context that holds the first rows of this layer."""
        return layer * self.step // len(self.bases)

    def pages_for(self, rows: int) -> int:
        """Returns how many pages the first `rows` rows of a context need."""
        return ceil_div(ceil_div(rows, self.part_rows) * self.step, len(self.bases[0]))

    def pages_before(self, row: int) -> int:
        """Returns how many pages of a context hold only rows before `row`."""
        return row // self.part_rows * self.step // len(self.bases[0])

    def simplified(self) -> "PagedSpan":
        """Returns a span of one part per page if every layer uses only one part of each page. Otherwise returns this
        span."""
        if self.step != len(self.bases[0]):
            return self
        bases = tuple((parts[self.first_part(layer)],) for layer, parts in enumerate(self.bases))
        return PagedSpan(bases, self.page_bytes, self.part_rows, self.row_bytes)
