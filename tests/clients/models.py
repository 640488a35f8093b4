"""The models that the matrix is served with, beside the bundled one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Final

from tests.support.row_versions import embedding_version, reranker_version

CHECKPOINT: Final = Path(__file__).parents[2] / "models" / "tiny" / "checkpoint"
# The form of Qwen's templates, in the bundled model's control tokens: tools, calls, results, reasoning.
TEMPLATE: Final = """\
{{- bos_token }}
{%- if tools %}
    {{- '<|system|># Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools>\\nA call is <tool_call>\\n{"name": "NAME", "arguments": {}}\\n</tool_call>' }}
    {{- eos_token }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|user|><tool_response>\\n' + message.content + '\\n</tool_response>' + eos_token }}
    {%- else %}
        {{- '<|' + message.role + '|>' }}
        {%- if message.reasoning_content %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n' }}
        {%- endif %}
        {%- if message.content %}{{- message.content | trim }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
    {%- if enable_thinking is defined and enable_thinking %}{{- '<think>\\n' }}{%- endif %}
{%- endif %}
"""


def agent_version(folder: Path) -> Path:
    """Write the bundled model with a chat template of tools and reasoning; return its folder."""
    shutil.copytree(CHECKPOINT, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    return folder


def versions(folder: Path) -> dict[str, Path]:
    """Write the models below ``folder``; return the folder of each name."""
    return {
        "agent": agent_version(folder / "agent"),
        "embedder": embedding_version(folder / "embedder"),
        "reranker": reranker_version(folder / "reranker"),
    }
