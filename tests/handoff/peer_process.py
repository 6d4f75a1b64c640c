"""A worker in a process of its own, for tests that kill it: `peer_process.py prefill|decode ADDRESS FOLDER HOLD`.

Prints its address, then what it does, a line each. A decode worker reads from stdin whom to ask, or `give up`, and
prints the facts; HOLD names a kind of message that it never sends.
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
    say("fact", type(engine.ended(key)).__name__)


def main(role: str, address: str, folder: str, hold: str) -> None:
    path = Path(folder) / "memory"
    post = open_channel(address)
    if role == "prefill":
        memory = FileTransfer.memory(path, 16, 16)
        PrefillEngine(memory, post, FileTransfer(path), hold=hold, report=lambda stage: say("stage", stage))
        say("address", post.address)
        sys.stdin.read()
        return
    faulty = FaultyPost(post)
    faulty.lose[hold] = sys.maxsize
    engine = DecodeEngine(FileTransfer.memory(path, 64, 8), faulty, FileTransfer(path))
    say("address", post.address)
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
