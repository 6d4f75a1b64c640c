"""An engine as a program on a node. It gets its configuration as JSON, and reads and writes lines of JSON.

A line `{"name", "prompt", "tokens", "prefill_at"}` asks for an answer. The program writes `{"name", "token_ids"}` for
tokens as they come, and in the end `{"name", "end": null}`, or the error as a text. Any other line asks for some of the
statistics. At the end of its input, the program ends.
"""

import asyncio
import json
import sys
from typing import Any

from hotset.base.config import EngineConfig
from hotset.base.logs import log_to_stderr
from hotset.base.request_options import RequestOptions
from hotset.base.sampling import SamplingParams
from hotset.engine.client import EngineClient
from hotset.engine.process import AUDIT_AFTER_IDLE_S, EngineProcess


def write(**line: Any) -> None:
    print(json.dumps(line), flush=True)


async def answer(client: EngineClient, line: dict[str, Any]) -> None:
    options = RequestOptions(prefill_at=line["prefill_at"])
    params = SamplingParams(temperature=0, max_tokens=line["tokens"], ignore_eos=True)
    try:
        async for delta in client.generate(line["name"], line["prompt"], params, options):
            write(name=line["name"], token_ids=list(delta.token_ids))
        write(name=line["name"], end=None)
    except Exception as error:
        write(name=line["name"], end=f"{type(error).__name__}: {error}")


async def report(client: EngineClient) -> None:
    """Writes the statistics, after the engine has audited itself if it is idle."""
    try:
        await asyncio.sleep(AUDIT_AFTER_IDLE_S + 0.3)
        client.check()
        stats = await client.stats()
        held = stats.device_pages_held + stats.host_pages_held
        write(held=held, quarantined=stats.quarantined_pages, landed=stats.landed, running=stats.running)
    except Exception as error:
        write(failed=f"{type(error).__name__}: {error}")


async def main() -> None:
    log_to_stderr()
    config = EngineConfig(**json.loads(sys.argv[1]))
    client = await asyncio.to_thread(EngineClient.start, config, EngineProcess(config))
    client.listen()
    write(control=client.control)
    tasks = set()
    try:
        while text := await asyncio.to_thread(sys.stdin.readline):
            line = json.loads(text)
            tasks.add(asyncio.create_task(answer(client, line) if "name" in line else report(client)))
    finally:
        await client.close(0.0)


if __name__ == "__main__":
    asyncio.run(main())
