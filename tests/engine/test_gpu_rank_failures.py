"""Two ranks on one GPU: if one is killed or stopped, the engine ends with an error that names it, no process and no GPU
memory is left, and a new engine starts at once."""

import os
import re
import signal
import threading
import time
from typing import Any

import pytest
import torch
from engine.symmetric_ranks import COLLECTIVES, has_mps
from harness import DEMO, executor_of, pids_of
from processes import is_running, pause, shared_memory_of, wait_until_ended
from waiting import wait_until

from hotset import LLM, SamplingParams
from hotset.base.errors import EngineStopped

MIB = 1 << 20
STEP_TIMEOUT_S = 5.0
NAMED_S = STEP_TIMEOUT_S + 10.0  # time from the signal to the error
NEW_ENGINE_S = 20.0  # time from the error to the first answer of a new engine
DEADLINE_S = 120.0
HELD_BYTES = 64 * MIB  # smaller differences in free memory do not count as held by a worker
PROMPT_TOKENS, CHUNK_TOKENS = 12_000, 128  # chunks of up to 64 tokens would be computed by graphs, like decode steps
SETTINGS: dict[str, Any] = {
    "device": "cuda",
    "tensor_parallel_size": 2,
    "ranks_per_gpu": 2,
    "collectives": COLLECTIVES,
    "max_num_seqs": 4,
    "max_num_batched_tokens": CHUNK_TOKENS,
    "device_kv_tokens": 32_768,
    "host_kv_tokens": 65_536,
    "speculate": 0,  # drafts would be measured at each start
    "step_timeout": STEP_TIMEOUT_S,
    "progress": False,
}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not has_mps(), reason="needs nvidia-cuda-mps-control -d; scripts/gpu ranks starts it"),
]


def free_bytes() -> int:
    return int(torch.cuda.mem_get_info(0)[0])


def answer(llm: LLM) -> list[int]:
    (output,) = llm.generate([{"prompt_token_ids": [1 + position % 40 for position in range(200)]}], GREEDY)
    return list(output.outputs[0].token_ids)


def kill_or_pause(pid: int, how: str) -> None:
    if how == "killed":
        os.kill(pid, signal.SIGKILL)
    else:
        pause(pid)


@pytest.mark.parametrize("when", ["prefill", "decode", "idle"])
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_rank_that_is_killed_or_stopped_is_named_and_leaves_nothing_behind(how: str, when: str) -> None:
    free_before = free_bytes()  # with the context of this process
    with LLM(DEMO, **SETTINGS) as llm:
        expected = answer(llm)
        pids = pids_of(llm)
        shared, victim = shared_memory_of(pids), executor_of(llm).workers[1]
        steps_before, stopped_at = victim.progress.steps, [0.0]

        def stop_during_steps() -> None:
            assert wait_until(lambda: victim.progress.steps >= steps_before + 5, DEADLINE_S), "few steps were executed"
            stopped_at[0] = time.monotonic()
            kill_or_pause(pids[1], how)

        killer = threading.Thread(target=stop_during_steps, daemon=True)
        length = PROMPT_TOKENS if when == "prefill" else 3
        prompt = {"prompt_token_ids": [1 + position % 40 for position in range(length)]}
        if when == "idle":
            stopped_at[0] = time.monotonic()
            kill_or_pause(pids[1], how)
            wait_until_ended(pids)
        else:
            killer.start()
        during = ", in step " if when != "idle" else ""
        message = {
            "killed": "worker 1 (stage 0 of 1, rank 1 of 2) died (exit code -9)",
            "stopped": "worker 1 (stage 0 of 1, rank 1 of 2) has shown no sign of life for "
            f"{STEP_TIMEOUT_S:g} s (--step-timeout){during}",
        }
        with pytest.raises(EngineStopped, match=re.escape(message[how])):
            for _ in llm.stream(prompt, SamplingParams(temperature=0, max_tokens=4_000, ignore_eos=True)):
                pass
        named_at = time.monotonic()
        assert named_at - stopped_at[0] < NAMED_S
        if when == "prefill":
            steps = victim.progress.steps - steps_before
            assert steps < PROMPT_TOKENS // CHUNK_TOKENS, "the prompt was finished before the signal"
    assert not any(is_running(pid) for pid in pids), "a worker outlived its engine"
    assert not any(path.exists() for path in shared), "a worker has left shared memory"
    assert wait_until(lambda: free_bytes() > free_before - HELD_BYTES, NEW_ENGINE_S), "GPU memory of workers is in use"
    with LLM(DEMO, **SETTINGS) as llm:
        assert answer(llm) == expected
        assert time.monotonic() - named_at < NEW_ENGINE_S


def test_workers_are_on_the_gpu_that_was_named_and_the_controller_allocates_nothing_there() -> None:
    reserved = torch.cuda.memory_reserved(0)
    with LLM(DEMO, **SETTINGS, gpus="0") as llm:
        assert [worker.rank.device for worker in executor_of(llm).workers] == ["cuda:0", "cuda:0"]
        assert [worker.rank.ranks_on_gpu for worker in executor_of(llm).workers] == [2, 2]
        assert len(answer(llm)) == GREEDY.max_tokens
        assert torch.cuda.memory_reserved(0) == reserved
