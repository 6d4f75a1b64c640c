"""The page allocator is compared with a set of held pages."""

from examples import examples
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hotset.memory.pages import PageAllocator, extend_runs


class AllocatorMachine(RuleBasedStateMachine):
    @initialize(capacity=st.integers(1, 24))
    def start(self, capacity: int) -> None:
        self.pages = PageAllocator(capacity)
        self.held: list[list[int]] = []

    @rule(count=st.integers(1, 12), data=st.data())
    def allocate(self, count: int, data: st.DataObject) -> None:
        taken = {page for pages in self.held for page in pages}
        after = data.draw(st.sampled_from([None, *(pages[-1] for pages in self.held)]))
        longest = longest_run(set(range(self.pages.capacity)) - taken)
        got = self.pages.allocate(count, after)
        if got is None:
            assert count > self.pages.capacity - len(taken), "pages were refused although enough are free"
            return
        assert len(got) == len(set(got)) == count
        assert not taken & set(got), "a page was allocated twice"
        if after is not None and after + 1 < self.pages.capacity and after + 1 not in taken:
            assert got[0] == after + 1, "the pages do not continue the run that ends in `after`"
        elif longest >= count:
            assert got == list(range(got[0], got[0] + count)), "a free run is long enough, but not used"
        self.held.append(got)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.held:
            self.pages.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @invariant()
    def audit(self) -> None:
        if hasattr(self, "pages"):
            self.pages.audit()
            assert self.pages.held == sum(map(len, self.held))


def longest_run(free: set[int]) -> int:
    best = length = 0
    for page in range(max(free, default=-1) + 1):
        length = length + 1 if page in free else 0
        best = max(best, length)
    return best


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = examples(30, stateful_step_count=40)


def test_only_consecutive_pages_are_merged_into_a_run() -> None:
    runs: list[tuple[int, int]] = []
    extend_runs(runs, [3, 4, 7])
    extend_runs(runs, [8, 2])
    assert runs == [(3, 2), (7, 2), (2, 1)]
