"""Headers that coding agents send by themselves, as their published sources have them."""

from collections.abc import Mapping

SESSION = "5e9f7a1c-7f3b-4a51-9d1b-2f3f6f6f0c11"
CODING_AGENTS: Mapping[str, Mapping[str, str]] = {
    "Claude Code": {
        "user-agent": "claude-cli/2.1.0 (external, cli)",
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
        "anthropic-dangerous-direct-browser-access": "true",
        "x-app": "cli",
        "x-claude-code-session-id": SESSION,
        "x-stainless-helper-method": "stream",
        "x-stainless-timeout": "600",
    },
    "Codex": {
        "user-agent": "codex_cli_rs/0.98.0 (Debian 12.0.0; x86_64)",
        "originator": "codex_cli_rs",
        "openai-beta": "responses=experimental",
        "conversation_id": SESSION,
        "session_id": SESSION,
        "session-id": SESSION,
        "thread-id": SESSION,
        "x-codex-turn-state": "opaque",
    },
    "OpenCode": {
        "user-agent": "opencode/1.2.10 ai-sdk/provider-utils/3.0.18",
        "x-session-id": SESSION,
        "x-session-affinity": SESSION,
        "x-opencode-client": "cli",
        "x-opencode-project": "global",
        "x-opencode-request": "msg_1",
        "x-opencode-session": SESSION,
    },
    "pi": {
        "user-agent": "pi/0.55.0",
        "session_id": SESSION,
        "x-client-request-id": SESSION,
        "x-session-affinity": SESSION,
    },
    "OpenClaw": {
        "user-agent": "openclaw/2026.2.1",
        "session-id": SESSION,
        "x-session-id": SESSION,
    },
}
"""Agent -> its headers, beside those of every HTTP client."""
SESSION_FIELDS = {
    "session_id": SESSION,
    "vllm_xargs": {"agentic_context": {"session": SESSION, "turn": 3}},
}
"""Fields of bodies by which agents name a session."""
