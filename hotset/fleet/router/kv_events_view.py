"""The router's view of one worker's prefix caches, which follows the worker's KV events."""

import asyncio
import logging
from collections.abc import Sequence
from urllib.parse import urlsplit

import zmq.asyncio

from hotset.fleet.kv_events.subscriber import KvEventSubscriber
from hotset.serve.responses import KvEventsPorts

LOGGER = logging.getLogger("hotset.router")
RESTART_SECONDS = 1.0  # time between the failure of a subscriber and its next start


class KvEventsView:
    """Follows the KV events of a worker, which has one publisher for each data parallel rank, until `close`."""

    def __init__(self, context: zmq.asyncio.Context, worker_url: str, publishers: Sequence[KvEventsPorts]) -> None:
        """The caller owns `context`. Connects only to the host of `worker_url`, whatever address the publishers report,
        so that a worker cannot make the router connect to another host."""
        self.publishers = publishers
        host = urlsplit(worker_url).hostname or ""
        base = f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
        self._subscribers = [
            KvEventSubscriber(
                context, f"{base}:{ports.live}", None if ports.replay is None else f"{base}:{ports.replay}"
            )
            for ports in publishers
        ]
        self._tasks = [asyncio.create_task(self._follow(worker_url, each)) for each in self._subscribers]

    @property
    def synced(self) -> bool:
        """False while the caches are unknown: without a connection, and while missed events are requested."""
        return all(subscriber.synced for subscriber in self._subscribers)

    def has_block(self, block_hash: int) -> bool | None:
        """Returns whether a page is in a cache of the worker, or None if the caches are unknown."""
        return any(block_hash in subscriber.blocks for subscriber in self._subscribers) if self.synced else None

    @staticmethod
    async def _follow(worker_url: str, subscriber: KvEventSubscriber) -> None:
        """Runs a subscriber, and starts it again whenever it fails. Logs the first failure."""
        logged = False
        while True:
            try:
                await subscriber.run()
            except Exception as error:
                if not logged:
                    logged = True
                    LOGGER.warning("cannot follow the KV events of %s: %s; still trying", worker_url, error)
            await asyncio.sleep(RESTART_SECONDS)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def wait_closed(self) -> None:
        """Closes, and waits until no socket is open."""
        self.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
