"""An engine with worker processes gives the same tokens as one process. All workers exit if one of them dies or is
stopped, or if the controller dies."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from harness import pids_of, tiny_directory
from processes import is_running, pause, shared_memory_of, wait_until_ended
from waiting import wait_until

from hotset import LLM, SamplingParams
from hotset.base import endings
from hotset.base.config import EngineConfig
from hotset.base.errors import ConfigError, EngineStopped
from hotset.base.processes import ending_processes, name_as_ending
from hotset.base.request_options import RequestOptions
from hotset.base.status_line import TaskProgress
from hotset.engine.build import build_engine
from hotset.engine.input_processor import InputProcessor
from hotset.engine.workers.processes import MultiprocessExecutor

DEADLINE_S = 90.0
TINY = {"num_key_value_heads": 2, "max_position_embeddings": 4096, "hidden_size": 32, "num_hidden_layers": 3}
SETTINGS: dict[str, Any] = {
    "load_format": "dummy",
    "device": "cpu",
    "max_num_seqs": 4,
    "device_kv_tokens": 4096,
    "host_kv_tokens": 8192,
    "progress": False,
    "max_num_batched_tokens": 64,
}
PROMPTS = [{"prompt_token_ids": [1 + (7 * position + 3 * n) % 40 for position in range(30 + 40 * n)]} for n in range(4)]
PARAMS = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


def answers(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_ranks_in_two_stages_give_the_same_answers_as_one_process(tmp_path: Path, ranks: int) -> None:
    model = tiny_directory(tmp_path, **TINY)
    with LLM(model, **SETTINGS) as single:
        expected = answers(single)
    with LLM(model, **SETTINGS, tensor_parallel_size=ranks, pipeline_parallel_size=2) as llm:
        assert answers(llm) == expected
        llm.audit()
        assert llm.stats().host_pages_held == 0
        pids = pids_of(llm)
        shared = shared_memory_of(pids)
    assert not any(is_running(pid) for pid in pids), "a worker outlived its engine"
    assert not any(path.exists() for path in shared), "a worker has left shared memory"


@pytest.mark.parametrize(
    ("fault", "when", "split"),
    [
        ("killed", "decode", "tensor"),
        ("stopped", "decode", "tensor"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("killed", "prefill", "pipeline"),
                ("killed", "idle", "data"),
                ("stopped", "prefill", "pipeline"),
                ("stopped", "idle", "data"),
            )
        ),
    ],
)
def test_a_killed_or_stopped_worker_is_named_at_the_end(tmp_path: Path, fault: str, when: str, split: str) -> None:
    with LLM(tiny_directory(tmp_path, **TINY), **SETTINGS, **{f"{split}_parallel_size": 2}, step_timeout=3.0) as llm:
        pids = pids_of(llm)
        shared = shared_memory_of(pids)
        long = {"prompt_token_ids": [1 + position % 40 for position in range(3000 if when == "prefill" else 3)]}
        stream = llm.stream(long, SamplingParams(temperature=0, max_tokens=900, ignore_eos=True))
        if when == "decode":
            next(stream)
        if fault == "killed":
            os.kill(pids[1], signal.SIGKILL)
        else:
            pause(pids[1])
        if when == "idle":
            wait_until_ended(pids[1:])
        during = "$" if when == "idle" else ", in step "
        message = {
            "killed": r"^worker 1 \(.*\) died \(exit code -9\)",
            "stopped": rf"^worker 1 \(.*\) has shown no sign of life for 3 s \(--step-timeout\){during}",
        }
        with pytest.raises(EngineStopped, match=message[fault]):
            list(stream)
    assert not any(is_running(pid) for pid in pids), "a worker outlived its engine"
    assert not any(path.exists() for path in shared), "a worker has left shared memory"


def test_if_a_rank_is_killed_while_rows_land_the_engine_ends_and_its_peer_frees_all_pages(tmp_path: Path) -> None:
    settings = {name: value for name, value in SETTINGS.items() if name != "progress"}
    model = tiny_directory(tmp_path, **TINY)
    prefill = build_engine(EngineConfig(model, **settings, role="prefill"))
    decode = build_engine(EngineConfig(model, **settings, role="decode", tensor_parallel_size=2))
    workers = decode.executor
    assert isinstance(workers, MultiprocessExecutor)
    pids = [worker.process.pid for worker in workers.workers]
    try:
        params = replace(PARAMS, seed=1)
        for choice in InputProcessor(decode.card, 0).accept(
            "a", [1] * 300, params, RequestOptions(prefill_at=prefill.card.control)
        ):
            decode.add(choice)
        deadline = time.monotonic() + DEADLINE_S
        while prefill.idle:  # the prefill worker has not received the request yet
            decode.step()
            prefill.step()
            assert time.monotonic() < deadline
        assert pids[0] is not None
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(EngineStopped, match=r"worker 0 .* died"):
            while time.monotonic() < deadline:
                decode.step()
    finally:
        decode.close()
    wait_until_ended([pid for pid in pids if pid is not None])
    while not prefill.idle:
        prefill.step()
        assert time.monotonic() < deadline + 2 * DEADLINE_S
    prefill.audit()
    assert prefill.stats().host_pages_held == 0
    prefill.close()


def _run_controller(model: str, pipe: Connection) -> None:
    llm = LLM(model, **SETTINGS, pipeline_parallel_size=2)
    pipe.send(pids_of(llm))
    while True:
        answers(llm)


def test_workers_exit_when_their_controller_is_killed(tmp_path: Path) -> None:
    context = get_context("spawn")
    pipe, controller_end = context.Pipe()
    controller = context.Process(target=_run_controller, args=(tiny_directory(tmp_path, **TINY), controller_end))
    controller.start()
    assert pipe.poll(DEADLINE_S), "the workers did not start"
    pids = pipe.recv()
    controller.kill()
    controller.join()
    wait_until_ended(pids)


def _generate_without_closing(model: str) -> None:
    LLM(model, **SETTINGS, data_parallel_size=2).generate(PROMPTS, PARAMS)


@pytest.mark.slow
def test_a_program_that_does_not_close_its_engine_still_exits(tmp_path: Path) -> None:
    program = get_context("spawn").Process(target=_generate_without_closing, args=(tiny_directory(tmp_path, **TINY),))
    program.start()
    program.join(2 * DEADLINE_S)
    assert program.exitcode == 0, "the program did not exit, or failed"


def test_a_split_that_does_not_suit_the_model_or_machine_is_refused(tmp_path: Path) -> None:
    model = tiny_directory(tmp_path, **TINY)
    with pytest.raises(ConfigError, match="nearest that works: 2"):
        LLM(model, **SETTINGS, tensor_parallel_size=3)
    with pytest.raises(ConfigError, match="from 1 to 3 stages work"):
        LLM(model, **SETTINGS, pipeline_parallel_size=4)
    with pytest.raises(ConfigError, match="has 4 layers and the model has 3"):
        LLM(model, **SETTINGS, pipeline_parallel_size=2, pipeline_layers="2,2")
    with pytest.raises(ConfigError, match="cannot be combined"):
        LLM(model, **SETTINGS, data_parallel_size=2, tensor_parallel_size=2)


def test_an_engine_is_built_when_an_earlier_one_has_freed_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endings, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(endings, "ending_seconds", lambda: DEADLINE_S)
    shown: list[TaskProgress] = []
    earlier = get_context("spawn").Process(target=end_after_its_parent)
    earlier.start()
    pid = earlier.pid or 0
    assert wait_until(lambda: pid in ending_processes())
    settings = {key: value for key, value in SETTINGS.items() if key != "progress"}
    config = EngineConfig(tiny_directory(tmp_path, **TINY), **settings)
    with ThreadPoolExecutor(1) as threads:
        building = threads.submit(build_engine, config, show=shown.append)
        try:
            assert wait_until(lambda: building.done() or any(str(pid) in progress.details for progress in shown))
            assert not any(progress.title.startswith("Loading") for progress in shown)
        finally:
            earlier.kill()
            earlier.join()
        building.result(DEADLINE_S).close()
    assert any(progress.title.startswith("Loading") for progress in shown)


def end_after_its_parent() -> None:
    """An engine process that ends because the process that started it has died."""
    name_as_ending()
    signal.pause()
