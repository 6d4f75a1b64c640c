"""The runs of scripts/clients: each function runs a client and checks what it reports."""

import json
import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clients.replay import replay  # in tests/

from hotset.models.checkpoint.files import embedded_path

DATA = Path(__file__).resolve().parents[1] / "tests" / "clients"
MODEL = "SmolLM2-135M-Instruct"
SHOWN_LINES = 30
QUESTION, NEXT_QUESTION = "What is the capital of France?", "And of Italy?"
# The clients load the tokenizer from a directory, and data from files; they need nothing from the network.
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONPATH": "",
}


class UnexpectedResult(Exception):
    pass


def check(condition: bool, message: str) -> None:
    if not condition:
        raise UnexpectedResult(message)


@dataclass(frozen=True)
class Session:
    """One run of a client: the server's URL, and the places of the client's programs and files."""

    url: str
    programs: Path  # the bin folder of the client's environment
    folder: Path  # the files of this run; empty at first
    tokenizer: Path  # a Hugging Face directory with the embedded model's tokenizer
    timeout_seconds: float

    def run(self, program: str, *arguments: str, folder: Path | None = None, **environment: str) -> str:
        """Runs a program of the client and returns what it printed. Raises UnexpectedResult if it fails.

        An empty value removes a variable from the environment.
        """
        command = [str(self.programs / program), *arguments]
        offline = OFFLINE | {"HF_HOME": str(self.folder / "hugging_face")}
        variables = {name: value for name, value in (os.environ | offline | environment).items() if value}
        try:
            ended = subprocess.run(
                command,
                cwd=folder or self.folder,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=self.timeout_seconds,
            )
        except subprocess.TimeoutExpired as error:
            raise UnexpectedResult(f"{program} did not end within {self.timeout_seconds:g} s") from error
        (self.folder / f"{program}.log").write_text(ended.stdout)
        check(ended.returncode == 0, f"{program} exited with {ended.returncode}:\n{last_lines(ended.stdout)}")
        return ended.stdout

    def only_file(self, pattern: str) -> Path:
        """Returns the one file below the folder of this run that matches `pattern`."""
        found = sorted(self.folder.glob(pattern))
        check(len(found) == 1, f"expected one file {pattern} in {self.folder}, found {len(found)}")
        return found[0]


# A run of a client. The docstring, which tables show, says what is run. The function returns the result in a few words.
Run = Callable[[Session], str]


def guidellm_sweep(session: Session) -> str:
    """The first benchmark in its README (a sweep), with shorter texts: one request at a time, then as many as possible,
    then a constant rate."""
    return _guidellm(session, "kind=sweep,sweep_size=3,max_concurrency=4", strategies=3)


def guidellm_rate(session: Session) -> str:
    """A constant rate of 2 requests/s."""
    return _guidellm(session, "kind=constant,rate=2", strategies=1)


def _guidellm(session: Session, profile: str, strategies: int) -> str:
    output_tokens = 8
    session.run(
        "guidellm",
        "run",
        *("--backend", f"kind=openai_http,target={session.url}"),
        *("--profile", profile),
        *("--constraint", "kind=max_requests,count=6"),
        *("--tokenizer", f"kind=huggingface_auto,model={session.tokenizer}"),
        *("--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={output_tokens}"),
        "--disable-console-interactive",
    )
    benchmarks = json.loads((session.folder / "benchmarks.json").read_text())["benchmarks"]
    check(len(benchmarks) == strategies, f"{len(benchmarks)} strategies were run, expected {strategies}")
    answered = 0
    for benchmark in benchmarks:
        requests, strategy = benchmark["requests"], benchmark["config"]["strategy"]["type_"]
        check(not requests["errored"], f"{strategy}: {len(requests['errored'])} requests failed")
        check(bool(requests["successful"]), f"{strategy}: no request succeeded")
        counted = benchmark["metrics"]["output_token_count"]["successful"]
        check(counted["min"] == counted["max"] == output_tokens, f"{strategy}: expected {output_tokens} tokens each")
        answered += len(requests["successful"])
    return f"{answered} requests, no errors, {output_tokens} tokens each"


def lm_eval_choice(session: Session) -> str:
    """A multiple-choice task of 40 items through `local-completions` (echo with log-probabilities), with prompts as
    token ids and as texts. Every item is compared with lm-eval's own `hf` backend."""
    task = "hotset_facts"
    expected = _lm_eval(session, "hf", task, "hf", _gguf_arguments(), "--batch_size", "8")
    with_ids = {"base_url": f"{session.url}/v1/completions", "model": MODEL, "tokenizer_backend": "remote"}
    with_texts = with_ids | {"tokenizer_backend": "huggingface", "tokenizer": str(session.tokenizer)}
    with_texts["tokenized_requests"] = "False"
    largest = 0.0
    for name, arguments in (("ids", with_ids), ("texts", with_texts)):
        found = _lm_eval(session, name, task, "local-completions", arguments, "--batch_size", "8")
        check(found.scores == expected.scores, f"{name}: scores {found.scores}, expected {expected.scores}")
        for ours, theirs in zip(found.responses, expected.responses, strict=True):
            for (logprob, greedy), (expected_logprob, expected_greedy) in zip(ours, theirs, strict=True):
                largest = max(largest, abs(float(logprob) - float(expected_logprob)))
                check(greedy == expected_greedy, f"{name}: is_greedy differs")
    check(largest < 1e-4, f"log-probabilities differ by up to {largest:.2g}")
    return f"acc {expected.scores['acc,none']:.3f} = hf; log-probabilities within {largest:.1g}"


def lm_eval_generation(session: Session) -> str:
    """A generation task of 40 questions through `local-chat-completions`. Every answer is compared with the `hf`
    backend."""
    task = "hotset_questions"
    expected = _lm_eval(session, "hf", task, "hf", _gguf_arguments(), "--apply_chat_template")
    arguments = {"base_url": f"{session.url}/v1/chat/completions", "model": MODEL, "num_concurrent": "4"}
    found = _lm_eval(session, "chat", task, "local-chat-completions", arguments, "--apply_chat_template")
    check(found.scores == expected.scores, f"scores {found.scores}, expected {expected.scores}")
    equal = sum(ours == theirs for ours, theirs in zip(found.responses, expected.responses, strict=True))
    check(equal == len(expected.responses), f"only {equal} of {len(expected.responses)} answers are equal")
    return f"contains {expected.scores['contains,none']:.3f} = hf; {equal} of {equal} answers equal"


def _gguf_arguments() -> dict[str, str]:
    """Returns the arguments that make `hf` read the server's GGUF file, with transformers' own reader."""
    path = embedded_path()
    return {"pretrained": str(path.parent), "gguf_file": path.name, "dtype": "float32"}


@dataclass(frozen=True)
class Evaluation:
    scores: dict[str, float]
    responses: list[Any]  # in the order of the documents


def _lm_eval(session: Session, name: str, task: str, model: str, options: Mapping[str, str], *more: str) -> Evaluation:
    output = session.folder / name
    session.run(
        "lm_eval",
        "run",
        *("--model", model),
        *("--model_args", ",".join(f"{key}={value}" for key, value in options.items())),
        *("--tasks", task),
        *("--include_path", "."),
        *("--output_path", str(output)),
        "--log_samples",
        *more,
        folder=DATA / "lm_eval_tasks",  # the tasks name their data files relative to this folder
    )
    results = json.loads(session.only_file(f"{name}/**/results_*.json").read_text())["results"][task]
    scores = {key: value for key, value in results.items() if key.endswith(",none")}
    lines = session.only_file(f"{name}/**/samples_{task}_*.jsonl").read_text().splitlines()
    samples = sorted(map(json.loads, lines), key=lambda sample: sample["doc_id"])
    return Evaluation(scores, [sample["filtered_resps"] for sample in samples])


def aiperf_profile(session: Session) -> str:
    """`aiperf profile` with streaming, which also scrapes /metrics."""
    requests = 6
    session.run(
        "aiperf",
        "profile",
        *("--model", MODEL),
        *("--url", session.url),
        *("--tokenizer", str(session.tokenizer)),
        *("--isl", "32"),
        *("--osl", "8"),
        *("--request-count", str(requests)),
        *("--concurrency", "2"),
        *("--ui", "none"),
        "--streaming",
        # If these variables are set, aiperf looks for the tokenizer on the hub instead of in the directory.
        HF_HUB_OFFLINE="",
        TRANSFORMERS_OFFLINE="",
    )
    report = json.loads(session.only_file("artifacts/*/profile_export_aiperf.json").read_text())
    check(report["request_count"]["avg"] == requests, f"{report['request_count']} requests, expected {requests}")
    check(not report["error_summary"], f"errors: {report['error_summary']}")
    scraped = json.loads(session.only_file("artifacts/*/server_metrics_export.json").read_text())["metrics"]
    wanted = {"vllm:num_requests_running", "vllm:kv_cache_usage_perc", "vllm:time_to_first_token_seconds"}
    check(wanted <= set(scraped), f"the metrics {sorted(wanted - set(scraped))} were not found")
    return f"{requests} requests, no errors; {len(scraped)} metrics scraped"


def llm_turns(session: Session) -> str:
    """Two streamed turns of a conversation; one answer without streaming, with its usage; a completion."""
    model = {"model_name": MODEL, "api_base": f"{session.url}/v1"}
    entries = [{"model_id": "hotset", **model}, {"model_id": "hotset-text", "completion": True, **model}]
    # YAML reads JSON.
    (session.folder / "extra-openai-models.yaml").write_text(json.dumps(entries))
    options = ["-o", "temperature", "0", "-o", "max_tokens", "8"]

    def ask(*arguments: str) -> str:
        return session.run("llm", *arguments, *options, LLM_USER_PATH=str(session.folder))

    first, second = ask("-m", "hotset", QUESTION), ask("--continue", NEXT_QUESTION)
    check("Paris" in first and "Rome" in second, f"answered {first!r} and {second!r}")
    whole = ask("-m", "hotset", "--no-stream", "--usage", QUESTION)
    check(whole.startswith(first.strip()) and "8 output" in whole, f"answered {whole!r} in one piece")
    text = ask("-m", "hotset-text", "The capital of France is")
    check(text.startswith(" Paris"), f"completed with {text!r}")
    return "Paris, then Rome; usage; completion"


def inspect_task(session: Session) -> str:
    """A task of 10 questions, through the provider `openai-api`."""
    log = inspect_log(session, "inspect_task.py@questions", MODEL, "--max-tokens", "16")
    check(len(log["samples"]) == 10, f"{len(log['samples'])} of 10 samples were completed")
    accuracy = log["results"]["scores"][0]["metrics"]["accuracy"]["value"]
    check(accuracy >= 0.5, f"accuracy {accuracy:.2f}; the model knows more than half of the answers")
    return f"10 samples, accuracy {accuracy:.2f}"


def inspect_log(session: Session, task: str, model: str, *options: str) -> dict[str, Any]:
    """Runs a task and returns inspect's log of it. Raises UnexpectedResult if it did not succeed."""
    session.run(
        "inspect",
        "eval",
        task,
        *("--model", f"openai-api/hotset/{model}"),
        *("--temperature", "0"),
        *("--display", "plain"),
        *("--log-format", "json"),
        *("--log-dir", str(session.folder / "logs")),
        *options,
        folder=DATA,  # inspect accepts only relative paths of tasks
        HOTSET_BASE_URL=f"{session.url}/v1",
        HOTSET_API_KEY="none",
    )
    log: dict[str, Any] = json.loads(session.only_file("logs/*.json").read_text())
    check(log["status"] == "success", f"status {log['status']}: {log.get('error')}")
    return log


def replay_sglang(session: Session) -> str:
    """Replays its recorded requests: completions with and without log-probabilities, chat."""
    return _replay(session, "sglang.bench_serving")


def replay_vllm(session: Session) -> str:
    """Replays its recorded requests: models, tokenize, detokenize, completions, chat, metrics."""
    return _replay(session, "vllm-bench-serve")


def _replay(session: Session, tool: str) -> str:
    try:
        return f"{replay(session.url, MODEL, tool)} requests answered"
    except AssertionError as error:
        raise UnexpectedResult(str(error)) from error


@dataclass(frozen=True)
class Client:
    version: str
    requirements: tuple[str, ...]
    runs: tuple[Run, ...] = ()  # with the embedded model
    scripted_runs: tuple[Run, ...] = ()  # with a model that follows a script
    is_node_program: bool = False  # installed with npm


def save_tokenizer(folder: Path) -> None:
    """Saves the embedded model's tokenizer, which transformers reads from the GGUF file."""
    import transformers

    path = embedded_path()
    transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)


def last_lines(text: str) -> str:
    return "\n".join(text.splitlines()[-SHOWN_LINES:])


TORCH = "torch==2.13.0"  # installed first: a looser requirement brings gigabytes of CUDA packages
LM_EVAL = ("lm_eval[api]==0.4.13", "transformers==5.22.2", "gguf==0.19.0", "accelerate==1.15.0", "peft==0.21.2")
CLIENTS = {
    "guidellm": Client("0.8.1", (TORCH, "guidellm==0.8.1"), (guidellm_sweep, guidellm_rate)),
    "lm-eval": Client("0.4.13", (TORCH, *LM_EVAL), (lm_eval_choice, lm_eval_generation)),
    "aiperf": Client("0.13.0", ("aiperf==0.13.0",), (aiperf_profile,)),
    "llm": Client("0.36", ("llm==0.36",), (llm_turns,)),
    "inspect-ai": Client("0.3.285", ("inspect-ai==0.3.285", "openai==3.49.0"), (inspect_task,)),
    "sglang.bench_serving": Client("cce0a12", (), (replay_sglang,)),
    "vllm-bench-serve": Client("a014e35", (), (replay_vllm,)),
}
