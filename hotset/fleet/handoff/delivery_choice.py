"""Chooses how a context is delivered: from which memory it is read, and whether by direct writes or staged."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hotset.engine.ports import Route
from hotset.fleet.handoff import messages as msg
from hotset.fleet.handoff.deliveries import Delivery, DirectDelivery, PackedDelivery, Sources
from hotset.fleet.handoff.layout import landing_pages
from hotset.fleet.handoff.messages import Store
from hotset.fleet.handoff.routes import DEVICE_SHARE, find_route
from hotset.fleet.handoff.staged_delivery import StagingOffer, make_offer
from hotset.fleet.handoff.staging import can_pack_pages, packed_row_bytes, should_stage, small_write_bytes


@dataclass(frozen=True, slots=True)
class DeliveryChoice:
    """The store from which a context is read, and how it is delivered. By default, its pages are written directly. If
    that would be slower, it is staged (`offer`), or its rows are packed for direct writes (`packed_rows`)."""

    source: Store
    offer: StagingOffer | None = None
    packed_rows: int = 0  # the maximum rows of a list if rows are packed for direct writes, else 0

    def direct(self, sources: Sources, target: Store, request: msg.HandoffRequest) -> Delivery:
        """Returns the delivery by direct writes, for a context that is not staged."""
        pages = landing_pages(request, target)
        if self.packed_rows:
            return PackedDelivery(sources, target, pages, request.first, self.packed_rows)
        return DirectDelivery(sources, target, pages)


def choose_delivery(
    sources: Sources,
    target: Store,
    request: msg.HandoffRequest,
    routes: Sequence[Route],
    run_pages: Mapping[str, int],
    *,
    buffer_bytes: int,
    max_direct_writes: int,
) -> DeliveryChoice:
    """Chooses by the measured routes. `run_pages` maps kinds of memory to the expected length of runs of pages."""
    source, route = sources.host, find_route(routes, sources.host.memory, target.memory)
    if (device := sources.device) is not None:
        from_device = find_route(routes, device.memory, target.memory)
        if from_device is not None and (route is None or DEVICE_SHARE * from_device.gb_per_s > route.gb_per_s):
            source, route = device, from_device
    of_source = run_pages.get(source.memory)
    if not should_stage(source, target, request, max_direct_writes, route=route, run_pages=of_source):
        return DeliveryChoice(source)
    page, packed_rows = target.shards[0].span, buffer_bytes // packed_row_bytes(source, target)
    large = page.part_rows * page.row_bytes >= small_write_bytes(source, target, route)
    if large and packed_rows and can_pack_pages(source, target):
        return DeliveryChoice(source, packed_rows=packed_rows)
    return DeliveryChoice(source, make_offer(source, target, request, buffer_bytes))
