"""Runs coding agents with a scripted model. Each gets the task to write a file, and must call a tool to do it."""

from pathlib import Path

from client_runs import Client, Session, check

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
    """`codex exec` through `/v1/responses`: it calls `exec_command`, which writes a file, and reports the result."""
    home = _home(session)
    (home / ".codex").mkdir()
    (home / ".codex" / "config.toml").write_text(CODEX_CONFIG.format(model=SCRIPTED_MODEL, url=session.url))
    options = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    said = session.run("codex", "exec", *options, "Please write-with-codex.", HOME=str(home), OPENAI_API_KEY="")
    return _checked(session, said, "made by codex\n")


def claude_writes(session: Session) -> str:
    """`claude -p` through `/v1/messages`: it calls `Bash`, which writes a file, and reports the result."""
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


def _home(session: Session) -> Path:
    """Returns an empty home, so that the agent finds no settings and no keys of the user."""
    home = session.folder / "home"
    home.mkdir()
    return home


def _checked(session: Session, said: str, written: str) -> str:
    made = session.folder / "made.txt"
    check(made.exists() and made.read_text() == written, f"made.txt is not as it should be; the agent said: {said}")
    check("The file is written. Done." in said, f"the agent did not report the result: {said}")
    return "called its tool, and reported the result"


AGENTS = {
    "Codex": Client("0.166.0", ("@openai/codex@0.166.0",), (codex_writes,), is_node_program=True),
    "Claude Code": Client("2.1.325", ("@anthropic-ai/claude-code@2.1.325",), (claude_writes,), is_node_program=True),
}
