"""Requests that run while a cluster changes, compared with the answers of one server."""

import json
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import plain_http

PROMPTS = [[random.Random(seed).randrange(4, 50) for _ in range(3 + 3 * seed)] for seed in range(16)]
LONG_PROMPTS = [[random.Random(seed).randrange(4, 50) for _ in range(700)] for seed in range(16, 24)]
MAX_TOKENS = 24
NO_ROUTER = ("no_connection", "connection_lost")  # what clients see while the router is lost
BODY = {"max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


def expected_tokens(url: str, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    """Returns the answers of a server to all prompts."""
    answers = [plain_http.post(f"{url}/v1/completions", json={"prompt": p, **BODY}, timeout=120) for p in prompts]
    return [answer.raise_for_status().json()["choices"][0]["token_ids"] for answer in answers]


@dataclass
class Traffic:
    """Clients and the outcomes of their requests: "ok", error codes, or "wrong" for answers with other tokens."""

    expected: list[list[int]]
    prompts: list[list[int]] = field(default_factory=lambda: PROMPTS)
    outcomes: Counter[str] = field(default_factory=Counter)
    details: list[str] = field(default_factory=list)
    patience: float = 120.0  # seconds after which a client gives up and counts "timed_out"

    @contextmanager
    def running(self, find_url: Callable[[], str], clients: int = 4) -> Iterator[None]:
        """Sends requests from several clients during the block, and waits for the last answers.

        `find_url` is called again when the router cannot be reached.
        """
        stop = threading.Event()
        threads = [threading.Thread(target=self._client, args=(find_url, number, stop)) for number in range(clients)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join(150)
            assert not any(thread.is_alive() for thread in threads), "a request hangs"

    @property
    def failures(self) -> dict[str, int]:
        return {outcome: count for outcome, count in self.outcomes.items() if outcome != "ok"}

    def _client(self, find_url: Callable[[], str], number: int, stop: threading.Event) -> None:
        order = random.Random(number)
        url = find_url()
        while not stop.is_set():
            index = order.randrange(len(self.prompts))
            outcome = self._request(url, self.prompts[index], self.expected[index], streamed=order.random() < 0.5)
            self.outcomes[outcome] += 1
            if outcome != "ok":
                stop.wait(0.2)
            if outcome in (*NO_ROUTER, "timed_out"):
                with suppress(Exception):  # there is none yet, or the controller does not answer either
                    url = find_url()

    def _request(self, url: str, prompt: list[int], expected: list[int], *, streamed: bool) -> str:
        body = {"prompt": prompt, **BODY, "stream": streamed}
        try:
            answer = plain_http.post(f"{url}/v1/completions", json=body, timeout=self.patience)
        except httpx.TimeoutException:
            return "timed_out"
        except httpx.ConnectError:
            return "no_connection"
        except (httpx.RemoteProtocolError, httpx.ReadError):
            return "connection_lost"
        if answer.status_code != 200:
            return str(answer.json()["error"]["code"])
        if not streamed:
            tokens = answer.json()["choices"][0]["token_ids"]
        else:
            events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
            parsed: list[Any] = [json.loads(event) for event in events if event != "[DONE]"]
            tokens = [t for event in parsed if "choices" in event for c in event["choices"] for t in c["token_ids"]]
            error = next((event["error"]["code"] for event in parsed if "error" in event), None)
            if error is not None:
                # What was answered before the error must be right.
                return str(error) if tokens == expected[: len(tokens)] else "wrong"
        if tokens == expected:
            return "ok"
        self.details.append(f"{prompt[:50]}: {tokens} instead of {expected}")
        return "wrong"
