"""Prefill workers are killed, or stopped for 10 s, at random moments during traffic. No token is wrong, no page lost.

Clients send prompts to a decode worker, which asks one of two prefill workers for each. A request that fails must fail
with HandoffLost, and the client sends it again, as a router would. The tests print what happened.
"""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from engine.test_handoff_processes import Workers, answer, num_open, pages_held, quarantined, run, wait_for_audit
from processes import pause

from hotset.base.errors import HandoffLost
from hotset.engine.client import EngineClient

pytest.importorskip("nixl")

FAULTS = 20
CLIENTS = 4
PAUSE_S = 10.0
MAX_QUARANTINE_S = 10.0  # after a kill, or after a stopped worker continues
RETRY_S = 0.2
TOKENS = [3 + position % 90 for position in range(1200)]
PROMPTS = [TOKENS[first : first + length] for first, length in ((0, 60), (7, 200), (20, 500), (33, 900))]


@dataclass
class Traffic:
    """Requests to a decode worker, each with one of the prefill workers in `prefills`."""

    decode: EngineClient
    expected: list[list[int]]
    prefills: dict[int, EngineClient] = field(default_factory=dict)  # by slot; a killed worker is missing
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    stopped: bool = False

    async def client(self, number: int) -> None:
        rng, serial = random.Random(number), 0
        while not self.stopped:
            serial += 1
            await self._ask(f"client {number} request {serial}", rng)

    async def _ask(self, name: str, rng: random.Random) -> None:
        """Sends one request until it is answered."""
        prompt, attempt = rng.randrange(len(PROMPTS)), 0
        while True:
            attempt += 1
            prefill = rng.choice(list(self.prefills.values())) if self.prefills else None
            try:
                found = await answer(self.decode, f"{name} attempt {attempt}", PROMPTS[prompt], prefill)
            except HandoffLost:
                self.outcomes["failed and sent again"] += 1
                await asyncio.sleep(RETRY_S)
                continue
            self.outcomes["answered" if attempt == 1 else "answered after a failure"] += 1
            if found != self.expected[prompt]:
                self.wrong.append(f"{name}: {found} instead of {self.expected[prompt]}")
            return

    async def quarantine_seconds(self, began: float) -> float:
        """Waits until nothing is in quarantine, and returns how long after `began` that was."""
        while quarantined(await self.decode.stats()):
            assert time.monotonic() - began < 60.0, f"still in quarantine: {await self.decode.stats()}"
            await asyncio.sleep(0.05)
        return time.monotonic() - began


async def kill_and_replace(traffic: Traffic, workers: Workers, slot: int) -> float:
    """Kills a prefill worker and starts its successor. Returns how long after the kill nothing was in quarantine."""
    victim = traffic.prefills.pop(slot)
    assert victim._process.pid is not None
    os.kill(victim._process.pid, signal.SIGKILL)
    began = time.monotonic()
    starting = asyncio.create_task(workers.start("prefill"))
    await asyncio.sleep(5.0)  # the decode worker notices a death after 4 s at most; pages enter quarantine only then
    seconds = await traffic.quarantine_seconds(began)
    (traffic.prefills[slot],) = await starting
    return seconds


async def stop_and_continue(traffic: Traffic, _workers: Workers, slot: int) -> float:
    """Stops a prefill worker for 10 s. Returns how long after that nothing was in quarantine."""
    pid = traffic.prefills[slot]._process.pid
    assert pid is not None
    await asyncio.to_thread(pause, pid)
    await asyncio.sleep(PAUSE_S)
    os.kill(pid, signal.SIGCONT)
    return await traffic.quarantine_seconds(time.monotonic())


@pytest.mark.slow
@pytest.mark.timeout(3000)  # a fault takes 5 to 15 s
@pytest.mark.parametrize("fault", [kill_and_replace, stop_and_continue])
def test_faults_of_prefill_workers_during_traffic_change_no_token_and_lose_no_page(
    fault: Callable[[Traffic, Workers, int], Awaitable[float]], tmp_path: Path
) -> None:
    async def scenario(workers: Workers) -> None:
        decode, *prefills = await workers.start("decode", "prefill", "prefill", step_timeout=600.0)
        expected = [await answer(decode, f"alone {number}", prompt, None) for number, prompt in enumerate(PROMPTS)]
        traffic = Traffic(decode, expected, dict(enumerate(prefills)))
        clients = [asyncio.create_task(traffic.client(number)) for number in range(CLIENTS)]
        seconds: list[float] = []

        async def inject(slot: int) -> None:
            rng = random.Random(slot)
            for _ in range(FAULTS // 2):
                await asyncio.sleep(rng.uniform(0.0, 3.0))
                seconds.append(await fault(traffic, workers, slot))

        await asyncio.gather(inject(0), inject(1))
        traffic.stopped = True
        await asyncio.gather(*clients)
        stats = await wait_for_audit(decode)
        print(f"\n{len(seconds)} times: {dict(traffic.outcomes)}; quarantine empty after {max(seconds):.1f} s at most")
        assert not traffic.wrong, traffic.wrong
        assert max(seconds) < MAX_QUARANTINE_S
        assert pages_held(stats) == quarantined(stats) == num_open(stats) == 0
        for prefill in traffic.prefills.values():
            assert pages_held(await wait_for_audit(prefill)) == 0

    run(tmp_path, scenario, seconds=3600.0)
