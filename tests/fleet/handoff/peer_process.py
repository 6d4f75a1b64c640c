"""A worker in its own process, for tests that kill it: `peer_process.py prefill|decode ADDRESS FOLDER STOP_BEFORE`.

The worker listens at ADDRESS, whose port may be 0, and keeps its memory in a file in FOLDER. It first prints
`address` and the address at which it really listens.

A prefill worker prints `stage STAGE` when a prompt reaches a stage. STOP_BEFORE is the stage before which every prompt
stops, or empty.

A decode worker reads lines from stdin: `PEER NAME TOKEN…` begins a handoff from the prefill worker at address PEER. The
worker prints `event TYPE` for the outcome of each handoff, and of a failure whether it is `quiesced` and whether to
`retry`.
"""

import sys
from pathlib import Path
from threading import Thread

from handoff_engines import DecodeEngine, FileTransfer, PrefillEngine

from hotset.fleet.handoff.agent import open_channel
from hotset.fleet.handoff.messages import FetchFailed
from hotset.schedule.handoffs import HandoffKey


def print_line(*words: object) -> None:
    print(*words, flush=True)


def report_outcome(engine: DecodeEngine, key: HandoffKey) -> None:
    event = engine.wait_for_outcome(key)
    details = [event.quiesced and "quiesced", event.retry and "retry"] if isinstance(event, FetchFailed) else []
    print_line("event", type(event).__name__, *filter(None, details))


def main(role: str, address: str, folder: str, stop_before: str) -> None:
    path = Path(folder) / "memory"
    channel = open_channel(address)
    if role == "prefill":
        memory = FileTransfer.memory(path, 16, 16)
        PrefillEngine(
            memory,
            channel,
            lambda: FileTransfer(path),
            stop_before=stop_before,
            report=lambda stage: print_line("stage", stage),
        )
        print_line("address", channel.address)
        sys.stdin.read()
        return
    engine = DecodeEngine(FileTransfer.memory(path, 64, 8), channel, lambda: FileTransfer(path))
    print_line("address", channel.address)
    for line in sys.stdin:
        peer, name, *token_ids = line.split()
        key = engine.fetch(peer, [int(token) for token in token_ids], name)
        Thread(target=report_outcome, args=(engine, key), daemon=True).start()


if __name__ == "__main__":
    main(*sys.argv[1:])
