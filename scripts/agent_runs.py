"""Runs agents with a scripted model. Each agent gets a task that requires a tool call."""

from dataclasses import replace
from pathlib import Path

from client_runs import CLIENTS, Client, Session, check, inspect_log

SCRIPTED_MODEL = "scripted"
AGENT_SCRIPTS = {
    "write-with-codex": [
        "I write it.",
        "\n<tool_call>\n",
        '{"name": "exec_command", "arguments": {"cmd": "echo made',
        ' by codex > made.txt"}}',
        "\n</tool_call>",
    ],
    "write-with-claude": [
        "I will write it.",
        "\n<tool_call>",
        '{"name": "Bash", "arguments": {"command": "echo made',
        ' by claude > made.txt", "description": "Writes a file"}}',
        "</tool_call>",
    ],
    "add-with-inspect": [
        "I add them.",
        "\n\n<tool_call>",
        '{"name": "add", "arguments": {"x": 19,',
        ' "y": 23}}',
        "</tool_call>\n",
    ],
    "result": ["The file ", "is written", ". Done."],
    "other": ["I do not", " understand", " this."],
}
CODEX_CONFIG = """
model = "{model}"
model_provider = "hotset"
web_search = "disabled"
[model_providers.hotset]
name = "Hotset"
base_url = "{url}/v1"
wire_api = "responses"
"""


def codex_writes(session: Session) -> str:
    """`codex exec` through `/v1/responses` calls `exec_command`, which writes a file, and reports the result."""
    home = _home(session)
    (home / ".codex").mkdir()
    (home / ".codex" / "config.toml").write_text(CODEX_CONFIG.format(model=SCRIPTED_MODEL, url=session.url))
    options = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    said = session.run("codex", "exec", *options, "Please write-with-codex.", HOME=str(home), OPENAI_API_KEY="")
    return _checked(session, said, "made by codex\n")


def claude_writes(session: Session) -> str:
    """`claude -p` through `/v1/messages` calls `Bash`, which writes a file, and reports the result."""
    said = session.run(
        "claude",
        *("-p", "Please write-with-claude.", "--allowedTools", "Bash"),
        HOME=str(_home(session)),
        ANTHROPIC_BASE_URL=session.url,
        ANTHROPIC_AUTH_TOKEN="none",
        ANTHROPIC_API_KEY="",
        ANTHROPIC_MODEL=SCRIPTED_MODEL,
        ANTHROPIC_DEFAULT_HAIKU_MODEL=SCRIPTED_MODEL,
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )
    return _checked(session, said, "made by claude\n")


def inspect_tools(session: Session) -> str:
    """A task with a tool through the provider `openai-api`, with and without streaming: inspect runs the calls of
    `add`, and sends their results."""
    for stream in ("false", "true"):
        part = replace(session, folder=session.folder / f"stream-{stream}")
        part.folder.mkdir()
        log = inspect_log(part, "inspect_task.py@tools", SCRIPTED_MODEL, "-M", f"stream={stream}")
        check(len(log["samples"]) == 3, f"{len(log['samples'])} of 3 samples were completed")
        for sample in log["samples"]:
            turns = [(message["role"], message["content"]) for message in sample["messages"]]
            check([role for role, _ in turns] == ["user", "assistant", "tool", "assistant"], f"the turns were {turns}")
            check(turns[2][1] == "42", f"the result of the tool was {turns[2][1]!r}")
        accuracy = log["results"]["scores"][0]["metrics"]["accuracy"]["value"]
        check(accuracy == 1, f"accuracy {accuracy:.2f}")
    return "2 x 3 samples, each with one call; accuracy 1.00"


def _home(session: Session) -> Path:
    """Returns an empty home directory, so that the agent finds no settings and no keys of the user."""
    home = session.folder / "home"
    home.mkdir()
    return home


def _checked(session: Session, said: str, written: str) -> str:
    made = session.folder / "made.txt"
    check(made.exists() and made.read_text() == written, f"made.txt must contain {written!r}; the agent said: {said}")
    check("The file is written. Done." in said, f"the agent did not report the result: {said}")
    return "called its tool, and reported the result"


AGENTS = {
    "inspect-ai": replace(CLIENTS["inspect-ai"], scripted_runs=(inspect_tools,)),
    "Codex": Client("0.166.0", ("@openai/codex@0.166.0",), scripted_runs=(codex_writes,), is_node_program=True),
    "Claude Code": Client(
        "2.1.325", ("@anthropic-ai/claude-code@2.1.325",), scripted_runs=(claude_writes,), is_node_program=True
    ),
}
