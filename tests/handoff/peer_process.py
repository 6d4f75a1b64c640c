"""A worker in its own process, for tests that kill it: `peer_process.py prefill|decode ADDRESS FOLDER HOLD`.

It prints its address and then one line for each action. A decode worker reads from stdin which prefill worker to use,
or `give up`, and prints the events. HOLD names a kind of message that it never sends.
"""

import sys
from pathlib import Path
from threading import Thread

from handoff_engines import DecodeEngine, FileTransfer, PrefillEngine
from handoff_world import FaultyPost

from hotset.handoff.agent import open_channel
from hotset.handoff.messages import HandoffKey


def say(*words: object) -> None:
    print(*words, flush=True)


def report(engine: DecodeEngine, key: HandoffKey) -> None:
    say("event", type(engine.ended(key)).__name__)


def main(role: str, address: str, folder: str, hold: str) -> None:
    path = Path(folder) / "memory"
    channel = open_channel(address)
    if role == "prefill":
        memory = FileTransfer.memory(path, 16, 16)
        PrefillEngine(memory, channel, FileTransfer(path), hold=hold, report=lambda stage: say("stage", stage))
        say("address", channel.address)
        sys.stdin.read()
        return
    faulty = FaultyPost(channel)
    faulty.lose[hold] = sys.maxsize
    engine = DecodeEngine(FileTransfer.memory(path, 64, 8), faulty, FileTransfer(path))
    say("address", channel.address)
    keys: list[HandoffKey] = []
    for line in sys.stdin:
        if line.strip() == "give up":
            engine.give_up(keys[-1])
            continue
        peer, name, *token_ids = line.split()
        keys.append(engine.fetch(peer, [int(token) for token in token_ids], name))
        Thread(target=report, args=(engine, keys[-1]), daemon=True).start()


if __name__ == "__main__":
    main(*sys.argv[1:])
