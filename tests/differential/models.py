"""Tiny models with a chat template for tools and reasoning, and with vLLM's parsers."""

import json
from pathlib import Path

TEMPLATE = """{{ bos_token }}
{%- if tools %}{{ '<|system|>' + (tools | tojson) + '<|end|>' }}{% endif %}
{%- for message in messages %}
    {%- set role = 'system' if message['role'] == 'developer' else message['role'] %}
    {{- '<|' + role + '|>' }}
    {%- if message['content'] is string %}{{ message['content'] }}
    {%- elif message['content'] %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}
    {%- endif %}
    {%- for call in message['tool_calls'] or [] %}
        {{- '<tool_call>' + (call['function'] | tojson) + '</tool_call>' }}
    {%- endfor %}
    {{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""


def with_parsers(path: Path, *, reasoning_parser: str | None = None) -> Path:
    """Set parsers and compact JSON in a registry, and the template in its models."""
    registry = json.loads(path.read_text())
    for model in registry["models"]:
        model["tool_parser"] = "hermes"
        model["reasoning_parser"] = reasoning_parser
        model["engine_args"] = {
            # Without this setting models with random weights write whitespace without end.
            "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}
        }
        settings = path.parent / model["path"] / "tokenizer_config.json"
        settings.write_text(
            json.dumps(json.loads(settings.read_text()) | {"chat_template": TEMPLATE})
        )
    path.write_text(json.dumps(registry))
    return path
