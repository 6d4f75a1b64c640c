"""A worker, a node, the controller or the head of a Ray cluster is killed or stopped while an engine computes a prompt,
decodes or is idle: the engine ends with an error that names what was lost, no process stays, and another one serves."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pytest
from engine.ray_nodes import SETTINGS, answers, simulated_nodes, sparse_model
from harness import executor_of, pids_of
from processes import descendants_of, parent_of, wait_until_ended

from hotset import LLM, SamplingParams
from hotset.base.errors import EngineStopped, StartupError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NOTICED_SECONDS = 10.0
SERVED_SECONDS = 90.0
LONG = SETTINGS | {"max_model_len": 4096, "device_kv_tokens": 4200, "host_kv_tokens": 8192}
TP2 = {"tensor_parallel_size": 2, "executor": "ray"}
PROMPTS = {"prefill": [position % 60 for position in range(3600)], "decode": [1, 2, 3]}
PARAMS = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
STEPS_BEFORE = 20  # after so many steps, the long prompt is still computed, and the short one decodes

each_phase = pytest.mark.parametrize("when", ["prefill", "decode", "idle"])
each_signal = pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])


@dataclass(frozen=True)
class Expected:
    """A model, and the answers that one process gives with it."""

    model: str
    short: list[list[int]]
    long: list[int]  # the answer to the prompt that decodes


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    model = sparse_model(tmp_path_factory.mktemp("model"))
    with LLM(model, **LONG) as single:
        (output,) = single.generate({"prompt_token_ids": PROMPTS["decode"]}, PARAMS)
    with LLM(model, **SETTINGS) as single:
        return Expected(model, answers(single, seed=1), output.outputs[0].token_ids)


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[str]:
    with simulated_nodes([1, 1]) as cluster:
        yield cluster.address


def send(pids: list[int], how: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, how)


def check_loss(llm: LLM, expected: Expected, when: str, lose: Callable[[], None], message: str) -> float:
    """Calls `lose` in a phase of a request. Checks that the engine soon ends with the error, and that what it answered
    until then is right. Returns the time of the loss."""
    executor, lost_at, tokens = executor_of(llm), list[float](), list[int]()

    def lose_in_phase() -> None:
        while when != "idle" and executor.steps_finished < STEPS_BEFORE:
            time.sleep(0.001)
        lost_at.append(time.monotonic())
        lose()

    thread = threading.Thread(target=lose_in_phase)
    thread.start()
    with pytest.raises(EngineStopped, match=message):
        while when == "idle":
            executor.check()
            time.sleep(0.05)
        for delta in llm.stream({"prompt_token_ids": PROMPTS[when]}, PARAMS):
            tokens += delta.token_ids
    seconds = time.monotonic() - lost_at[0]
    thread.join()
    assert tokens == expected.long[: len(tokens)] and bool(tokens) == (when == "decode")
    print(f"noticed after {seconds:.1f} s", file=sys.stderr)
    assert seconds < NOTICED_SECONDS
    return lost_at[0]


def check_served_again(expected: Expected, address: str, lost_at: float) -> None:
    """Starts engines until one serves, like the supervisor of an engine."""
    while True:
        try:
            with LLM(expected.model, **SETTINGS, **TP2, ray_address=address) as llm:
                assert answers(llm, seed=1) == expected.short
                seconds = time.monotonic() - lost_at
                llm.audit()
                break
        except StartupError as error:  # Ray has not noticed the loss yet
            assert time.monotonic() - lost_at < SERVED_SECONDS, error
    print(f"served again after {seconds:.1f} s", file=sys.stderr)
    assert seconds < SERVED_SECONDS


@each_phase
@each_signal
@pytest.mark.parametrize("worker", [0, 1])
def test_a_lost_worker_is_named_and_all_end(
    expected: Expected, two_nodes: str, worker: int, how: signal.Signals, when: str
) -> None:
    with LLM(expected.model, **LONG, **TP2, ray_address=two_nodes) as llm:
        pids, node = pids_of(llm), executor_of(llm).workers[worker].rank.node
        name = rf"worker {worker} \(stage 0 of 1, rank {worker} of 2, node {node}\)"
        message = rf"^{name} died \(it was killed or stopped, or its node is lost\)$"
        lost_at = check_loss(llm, expected, when, lambda: send([pids[worker]], how), message)
        wait_until_ended(pids)
    check_served_again(expected, two_nodes, lost_at)


@each_phase
@each_signal
def test_a_lost_node_is_named_and_other_nodes_serve(expected: Expected, how: signal.Signals, when: str) -> None:
    with simulated_nodes([1, 1, 1]) as cluster:
        with LLM(expected.model, **LONG, **TP2, ray_address=cluster.address) as llm:
            pids, node = pids_of(llm), executor_of(llm).workers[1].rank.node
            raylet = parent_of(pids[1])
            lost = [raylet, *descendants_of(raylet)]
            try:
                message = rf"^worker 1 \(.*, node {node}\) died \(.*or its node is lost\)$"
                lost_at = check_loss(llm, expected, when, lambda: send(lost, how), message)
                llm.close()
                check_served_again(expected, cluster.address, lost_at)
            finally:
                send(lost, signal.SIGCONT)
        wait_until_ended(pids)


CONTROLLER = """
import sys, threading, time
from hotset import LLM, SamplingParams
from hotset.base.errors import EngineStopped
llm = LLM({model!r}, **{settings!r}, ray_address={address!r})
executor = llm._engine.executor
print("workers", *[worker.process.pid for worker in executor.workers], flush=True)
def report():
    while {prompt!r} and executor.steps_finished < {steps}:
        time.sleep(0.001)
    print("in phase", flush=True)
threading.Thread(target=report, daemon=True).start()
try:
    if {prompt!r}:
        list(llm.stream({{"prompt_token_ids": {prompt!r}}}, SamplingParams(max_tokens=400, ignore_eos=True)))
    while True:
        executor.check()
        time.sleep(0.05)
except EngineStopped as error:
    print(f"EngineStopped: {{error}}", flush=True)
    llm.close()
"""


@contextmanager
def controller_process(
    expected: Expected, address: str, when: str
) -> Iterator[tuple["subprocess.Popen[str]", list[int]]]:
    """Starts a process with an engine that prints why it has ended, and waits until a request is in a phase. Yields it
    with the ids of its workers."""
    code = CONTROLLER.format(
        model=expected.model, settings=LONG | TP2, address=address, prompt=PROMPTS.get(when), steps=STEPS_BEFORE
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as controller:
        try:
            assert controller.stdout is not None
            workers = next(line for line in controller.stdout if line.startswith("workers "))
            assert next(controller.stdout) == "in phase\n"
            yield controller, [int(pid) for pid in workers.split()[1:]]
        finally:
            controller.kill()


def reason_of(controller: "subprocess.Popen[str]") -> str:
    """Waits for the error with which the engine ends, and returns it."""
    assert controller.stdout is not None
    return next(line for line in controller.stdout if line.startswith("EngineStopped"))


@each_phase
@each_signal
def test_workers_end_with_their_controller(expected: Expected, two_nodes: str, how: signal.Signals, when: str) -> None:
    with controller_process(expected, two_nodes, when) as (controller, pids):
        controller.send_signal(how)
        lost_at = time.monotonic()
        wait_until_ended(pids)
        seconds = time.monotonic() - lost_at
        print(f"noticed after {seconds:.1f} s", file=sys.stderr)
        assert seconds < NOTICED_SECONDS
        if how == signal.SIGSTOP:
            controller.send_signal(signal.SIGCONT)
            assert "or its node is lost" in reason_of(controller)
    check_served_again(expected, two_nodes, lost_at)


def test_a_stopped_worker_ends_without_its_controller(expected: Expected, two_nodes: str) -> None:
    with controller_process(expected, two_nodes, "idle") as (controller, pids):
        send([pids[1]], signal.SIGSTOP)
        controller.kill()
        wait_until_ended(pids)


@each_signal
def test_a_lost_head_ends_the_engine_with_an_error_that_names_it(expected: Expected, how: signal.Signals) -> None:
    with simulated_nodes([1, 1]) as cluster, controller_process(expected, cluster.address, "decode") as started:
        controller, pids = started
        head = cluster.head_node.all_processes["gcs_server"][0].process.pid
        try:
            send([head], how)
            lost_at = time.monotonic()
            error = reason_of(controller)
            seconds = time.monotonic() - lost_at
            reason = "Connection refused" if how == signal.SIGKILL else "timed out"
            assert re.match(rf"EngineStopped: the head of the Ray cluster at \S+ is lost \({reason}\)$", error)
            print(f"noticed after {seconds:.1f} s", file=sys.stderr)
            assert seconds < NOTICED_SECONDS
            wait_until_ended([*pids, controller.pid])
        finally:
            send([head], signal.SIGCONT)
