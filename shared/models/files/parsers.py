"""vLLM's parsers of tool calls and reasoning, by kind of model."""

from collections.abc import Iterable
from typing import NamedTuple

from shared.models.files.model_files import ModelFiles


class ParserRule(NamedTuple):
    """
    A parser and the models that it fits. The model type alone does not determine the format: the
    chat template must contain all markers.
    """

    parser: str
    model_types: frozenset[str]
    markers: tuple[str, ...]


_QWEN = frozenset({"qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "qwen2_5_vl"})
_QWEN3 = frozenset({"qwen3", "qwen3_moe"})
_GLM = frozenset({"glm4_moe"})
TOOL_RULES = (
    ParserRule("qwen3_coder", _QWEN, ("<function=", "<parameter=")),
    ParserRule("hermes", _QWEN, ("<tool_call>", '"arguments"')),
    ParserRule(
        "hermes", frozenset({"llama", "mistral"}), ("<tool_call>", '"arguments"', "<tools>")
    ),
    ParserRule("llama3_json", frozenset({"llama", "mllama"}), ("ipython", '"parameters"')),
    ParserRule("mistral", frozenset({"mistral", "mixtral"}), ("[TOOL_CALLS]", "[AVAILABLE_TOOLS]")),
    ParserRule("granite", frozenset({"granite"}), ("<|tool_call|>",)),
    ParserRule("glm45", _GLM, ("<tool_call>", "<arg_key>")),
    ParserRule("kimi_k2", frozenset({"kimi_k2", "deepseek_v3"}), ("<|tool_calls_section_begin|>",)),
)
"""The first rule that fits selects the parser of tool calls."""
REASONING_RULES = (
    ParserRule("qwen3", _QWEN3, ("<think>", "enable_thinking")),
    ParserRule(
        "deepseek_r1",
        frozenset({"deepseek_v3", "qwen2", "llama"}),
        ("<\uff5cAssistant\uff5c><think>",),
    ),
    ParserRule("glm45", _GLM, ("<think>", "enable_thinking")),
)
"""The first rule that fits selects the parser of reasoning."""


def tool_parser_of(files: ModelFiles) -> str | None:
    """Name of vLLM's parser of the model's tool calls; None if it is not known with certainty."""
    return _first(TOOL_RULES, files)


def reasoning_parser_of(files: ModelFiles) -> str | None:
    """Name of vLLM's parser of the model's reasoning; None if it is not known with certainty."""
    return _first(REASONING_RULES, files)


def _first(rules: Iterable[ParserRule], files: ModelFiles) -> str | None:
    # Templates write quotes of JSON keys either plain or escaped.
    template = files.chat_template().replace('\\"', '"')
    for rule in rules:
        if files.model_type in rule.model_types and all(map(template.__contains__, rule.markers)):
            return rule.parser
    return None
