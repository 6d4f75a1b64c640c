"""A router follows the KV events of its workers again after a failure, and logs it once."""

from contextlib import closing

import pytest
import zmq
import zmq.asyncio
from waiting import in_event_loop, until

from hotset.base.address import Address, EventsEndpoint
from hotset.fleet.kv_events.publisher import KvEventPublisher
from hotset.fleet.kv_events.subscriber import KvEventSubscriber
from hotset.fleet.router import kv_events_view
from hotset.fleet.router.kv_events_view import KvEventsView
from hotset.serve.responses import KvEventsPorts

LOOPBACK = Address("127.0.0.1", 0)


@in_event_loop
async def test_a_subscriber_that_fails_is_started_again_and_the_failure_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kv_events_view, "RESTART_SECONDS", 0.001)
    run, starts = KvEventSubscriber.run, 0

    async def failing_run(subscriber: KvEventSubscriber) -> None:
        nonlocal starts
        starts += 1
        if starts <= 3:
            raise zmq.ZMQError(zmq.EINVAL)
        await run(subscriber)

    monkeypatch.setattr(KvEventSubscriber, "run", failing_run)
    context = zmq.asyncio.Context()
    with closing(KvEventPublisher(EventsEndpoint(LOOPBACK, LOOPBACK))) as publisher:
        assert publisher.endpoint.replay is not None
        ports = KvEventsPorts(live=publisher.endpoint.live.port, replay=publisher.endpoint.replay.port)
        view = KvEventsView(context, "http://127.0.0.1:1", [ports])
        assert view.has_block(1) is None
        await until(lambda: view.synced)
        assert view.has_block(1) is False
        await view.wait_closed()
    context.destroy(linger=0)
    assert starts == 4
    [record] = caplog.records
    assert record.getMessage().startswith("cannot follow the KV events of http://127.0.0.1:1: Invalid argument")
